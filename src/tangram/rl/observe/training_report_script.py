"""The script and style of the training report: draws its charts, along the axis that was chosen, and as tables.

Owns what happens in the browser. All text comes out of the data and goes into the page as text, never as markup. Loads
nothing. A chart is drawn for the width that there is, so that its words stay as large as the others on a telephone.
"""

from __future__ import annotations

STYLE = """
.curves { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(330px, 100%), 1fr)); }
.small { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(290px, 100%), 1fr)); }
.curves > *, .small > *, .stack > * { min-width: 0; }
.curves, .small, .stack { margin-bottom: 14px; }
figure.chart { padding: 12px 14px 10px; position: relative; }
.chart h3 { padding-right: 52px; overflow-wrap: anywhere; }
.chart svg { touch-action: pan-y; }
.chart svg rect.all { fill: transparent; }
.chart .legend { font-size: 12.5px; gap: 2px 14px; margin: 6px 0 0; }
.chart .legend .dot.raw { opacity: .4; }
.plain { position: absolute; top: 9px; right: 10px; }
button.choice, .axis-choice label {
  font: 500 12.5px/1.4 inherit; font-family: inherit; padding: 2px 9px; color: var(--soft); background: var(--band);
  border: 1px solid var(--rule); border-radius: 6px; cursor: pointer;
}
button.choice:hover, .axis-choice label:hover { color: var(--ink); }
.axis-choice {
  position: sticky; top: 0; z-index: 5; display: flex; flex-wrap: wrap; gap: 6px; align-items: center; border: 0;
  margin: 30px 0 0; padding: 8px 0; background: var(--paper); font-size: 13.5px; color: var(--soft);
}
.axis-choice legend { float: left; padding: 0 6px 0 0; }
.axis-choice input { position: absolute; opacity: 0; }
.axis-choice input:checked + label { background: var(--ink); color: var(--paper); border-color: var(--ink); }
.axis-choice input:focus-visible + label { outline: 2px solid var(--p5); outline-offset: 2px; }
.curve.raw { stroke-width: 1.2; stroke-opacity: .35; }
.curve.thin { stroke-width: 1.2; stroke-opacity: .6; }
.mark { stroke: var(--bad); stroke-width: 1; stroke-dasharray: 2 3; } .flag { fill: var(--bad); }
.warmed { fill: var(--band); } .bars, .point { fill: var(--colour); } .bars.pale { fill-opacity: .35; }
.bars { stroke: var(--card); stroke-width: 0; }
.error { stroke: var(--colour); stroke-width: 1.2; }
.cross { stroke: var(--ink); stroke-opacity: .35; stroke-width: 1; }
.figures { max-height: 300px; overflow: auto; margin-top: 8px; }
.figures table { font-size: 12.5px; } .figures th, .figures td { padding: 3px 0 3px 14px; }
.figures caption { text-align: left; font-size: 12.5px; color: var(--soft); padding: 6px 0 2px; }
.say.after { margin-top: 10px; }
.held { position: relative; display: block; min-width: 120px; height: 12px; border-radius: 3px; background: var(--band);
  border: 1px solid var(--rule); overflow: hidden; margin-top: 5px; }
.held i { position: absolute; inset: 0 auto 0 0; background: var(--p1); }
.told td:first-child, .told td.left { white-space: normal; overflow-wrap: anywhere; min-width: 5.5em; }
.told td.left, .told th.left { text-align: left; } .told td.left:last-child { min-width: 16em; }
details { margin: 10px 0; } summary { cursor: pointer; color: var(--soft); font-size: 14.5px; }
dd { min-width: 0; } dd, h1, .card b, .card span, .label { overflow-wrap: anywhere; }
@media (max-width: 860px) { .wide { padding: 4px 12px; } .wide td + td, .wide th + th { padding-left: 12px; } }
"""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const LEFT = 50, RIGHT = 10, TOP = 14, BOTTOM = 24;
  const DENSE = 60;  // points of one curve, beyond which they would hide each other
  let axis = "step";

  const node = (parent, name, attributes, words) => {
    const made = document.createElementNS(NS, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (words !== undefined) made.textContent = words;
    parent.appendChild(made);
    return made;
  };
  const html = (parent, name, css, words) => {
    const made = document.createElement(name);
    if (css) made.className = css;
    if (words !== undefined) made.textContent = words;
    parent.appendChild(made);
    return made;
  };

  // ---- numbers in words

  const digits = (value, count) => value.toLocaleString("en", { maximumSignificantDigits: count });
  const said = (value, format) => {
    if (value === null || value === undefined) return "-";
    if (format === "percent") return digits(100 * value, 3) + " %";
    if (format === "seconds" && value !== 0 && Math.abs(value) < 1) return digits(1000 * value, 3) + " ms";
    if (format === "seconds") return digits(value, 3) + " s";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return Math.abs(value) < 1e-4 ? value.toExponential(2) : digits(value, 4);
  };
  const step = (rough) => {
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999999) * power;
  };
  const ticks = (low, high, about) => {
    const by = step((high - low) / about || 1), found = [];
    for (let k = Math.ceil(low / by - 1e-9); k * by <= high + by * 1e-6; k++)
      found.push(Number((k * by).toPrecision(12)));
    return found;
  };

  // ---- where things are

  const set = (series) => data.xs[series.set || "steps"];
  const label = (name, i) => name === "steps" ? data.words[i] : data.xs[name].words[i];

  function range(spec) {
    let low = Infinity, high = -Infinity;
    const see = (x) => { if (x === null || x === undefined) return; low = Math.min(low, x); high = Math.max(high, x); };
    data.xs.steps[axis].forEach(see);
    data.xs.steps.from[axis].forEach(see);
    if (spec.warm) data.warm[axis].forEach(see);
    for (const series of spec.series) set(series)[axis].forEach(see);
    if (high === -Infinity) return [0, 1];
    return high > low ? [low, high] : [low, low + 1];
  }

  function heights(spec) {
    let low = 0, high = spec.high || 0;
    const count = data.xs.steps[axis].length;
    if (spec.kind === "stack") {
      const sum = (i) => spec.series.reduce((sum, series) => sum + (series.y[i] || 0), 0);
      for (let i = 0; i < count; i++) high = Math.max(high, sum(i));
    } else {
      for (const series of spec.series) series.y.forEach((y, i) => {
        if (y === null) return;
        const error = series.error && series.error[i] || 0;
        low = Math.min(low, y); high = Math.max(high, y + (spec.high ? 0 : error));
      });
    }
    if (high === low) high = low + 1;
    return [low, spec.high && high <= spec.high ? spec.high : high * 1.04];
  }

  // ---- drawing

  function frame(figure, spec, tall) {
    figure.querySelector("svg")?.remove();
    const width = Math.max(220, figure.querySelector(".place").clientWidth);
    const svg = node(figure.querySelector(".place"), "svg", {
      viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": spec.label,
      "data-axis": spec.kind === "bars" ? "" : axis,
    });
    return [svg, width];
  }

  function scales(svg, spec, width, tall) {
    const [left, right] = range(spec), [low, high] = heights(spec);
    const bottom = tall - BOTTOM;
    const x = (value) => LEFT + (value - left) / (right - left) * (width - LEFT - RIGHT);
    const y = (value) => bottom - (value - low) / (high - low) * (bottom - TOP);
    if (spec.warm) {
      const from = x(Math.max(left, data.warm[axis][0])), to = x(data.warm[axis][1]);
      node(svg, "rect", { class: "warmed", x: from, y: TOP, width: Math.max(0, to - from), height: bottom - TOP });
      if (to - from > 62) node(svg, "text", { class: "small faint", x: from + 4, y: TOP + 11 }, "warm start");
    }
    for (const tick of ticks(low, high, tall > 200 ? 5 : 4)) {
      node(svg, "line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) });
      const words = said(tick, spec.format).replace(" ", "\\u00a0");
      node(svg, "text", { class: "tick", x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, words);
    }
    for (const tick of ticks(Math.max(0, left), right, Math.max(2, Math.floor(width / 90)))) {
      if (axis !== "seconds" && !Number.isInteger(tick)) continue;
      const anchor = x(tick) > width - 30 ? "end" : "middle", words = tick.toLocaleString("en");
      node(svg, "text", { class: "tick", x: x(tick), y: tall - 6, "text-anchor": anchor },
        axis === "seconds" ? words + " s" : words);
    }
    node(svg, "line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: y(Math.max(low, 0)), y2: y(Math.max(low, 0)) });
    return [x, y, bottom];
  }

  function lines(svg, spec, x, y) {
    for (const series of spec.series) {
      const xs = set(series)[axis];
      let path = "", open = false, alone = 0;
      series.y.forEach((value, i) => {
        if (value === null) { open = false; return; }
        path += `${open ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
        open = true; alone++;
      });
      const family = series.css.split(" ")[0];
      if (path && (!series.points || series.line))
        node(svg, "path", { class: `curve ${series.css}${series.points ? " thin" : ""}`, d: path });
      if (!series.points && alone !== 1) continue;
      const dense = alone > DENSE;
      series.y.forEach((value, i) => {
        if (value === null) return;
        const error = !dense && series.error && series.error[i], at = x(xs[i]);
        const ends = { x1: at, x2: at, y1: y(value - error), y2: y(value + error) };
        if (error) node(svg, "line", { class: `error ${family}`, ...ends });
        node(svg, "circle", { class: `point ${family}`, cx: at, cy: y(value), r: dense ? 1.5 : 3 });
      });
    }
  }

  function stacks(svg, spec, x, y) {
    const xs = data.xs.steps[axis], from = data.xs.steps.from[axis];
    for (let i = 0; i < xs.length; i++) {
      const left = x(from[i]), wide = Math.max(0.5, x(xs[i]) - left), gap = wide > 4 ? 1 : 0;
      let sum = 0;
      for (const series of spec.series) {
        const value = series.y[i] || 0;
        if (value <= 0) continue;
        node(svg, "rect", { class: `bars ${series.css}`, x: left.toFixed(2), width: (wide - gap).toFixed(2),
          y: y(sum + value).toFixed(2), height: (y(sum) - y(sum + value)).toFixed(2) });
        sum += value;
      }
    }
  }

  function marks(svg, x, bottom) {
    for (const mark of data.marks) {
      const at = x(mark[axis]);
      node(svg, "line", { class: "mark", x1: at, x2: at, y1: TOP, y2: bottom });
      const flag = node(svg, "path", { class: "flag", d: `M${at - 4} ${TOP - 8}h8l-4 7z`, "data-tip": mark.words });
      node(flag, "title", {}, mark.words);
    }
  }

  function pointing(svg, spec, x, width, bottom) {
    const cross = node(svg, "line", { class: "cross", y1: TOP, y2: bottom, visibility: "hidden" });
    const place = { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: bottom - TOP };
    const over = node(svg, "rect", { class: "all", ...place });
    over.dataset.tip = "";
    const sets = [...new Set(spec.series.map((series) => series.set || "steps"))];
    over.addEventListener("mousemove", (event) => {
      const at = (event.clientX - svg.getBoundingClientRect().left) * width / svg.getBoundingClientRect().width;
      let best = null;
      for (const name of sets) data.xs[name][axis].forEach((value, i) => {
        const middle = spec.kind === "stack" ? (x(value) + x(data.xs.steps.from[axis][i])) / 2 : x(value);
        const far = Math.abs(middle - at);
        if (!best || far < best.far) best = { far, name, i, middle };
      });
      if (!best) return;
      cross.setAttribute("x1", best.middle); cross.setAttribute("x2", best.middle);
      cross.setAttribute("visibility", "visible");
      const told = [label(best.name, best.i)];
      if (axis !== "step") told.push(`${data.axes[axis]}: ${said(data.xs[best.name][axis][best.i])}`);
      for (const series of spec.series) {
        if ((series.set || "steps") !== best.name || series.y[best.i] === null) continue;
        told.push(`${series.name}: ${value(spec, series, best.i)}`);
      }
      over.dataset.tip = told.join("\\n");
    });
    over.addEventListener("mouseleave", () => cross.setAttribute("visibility", "hidden"));
  }

  function value(spec, series, i) {
    const error = series.error && series.error[i];
    return said(series.y[i], spec.format) + (error ? " ± " + said(error, spec.format) : "");
  }

  function histogram(figure, spec) {
    const tall = 190, [svg, width] = frame(figure, spec, tall);
    const most = Math.max(1, ...spec.values), count = Math.max(spec.names.length, spec.limit.after + 2);
    const wide = (width - 2 * RIGHT) / count, bottom = tall - BOTTOM, top = TOP + 14;
    spec.names.forEach((name, i) => {
      const high = spec.values[i] / most * (bottom - top), left = RIGHT + i * wide, x = left + wide / 2;
      const share = said(spec.shares[i], "percent");
      node(svg, "rect", {
        class: `bars ${i > spec.limit.after ? "k4" : "p1"}`, x: left + wide * 0.1, y: bottom - high, width: wide * 0.8,
        height: high, "data-tip": `staleness ${name}: ${said(spec.values[i])} trajectories, ${share}`,
      });
      node(svg, "text", { class: "tick", x, y: tall - 6, "text-anchor": "middle" }, name);
      if (wide > 34) node(svg, "text", { class: "small", x, y: bottom - high - 4, "text-anchor": "middle" }, share);
    });
    node(svg, "line", { class: "axis", x1: RIGHT, x2: width - RIGHT, y1: bottom, y2: bottom });
    const at = RIGHT + (spec.limit.after + 1) * wide;
    node(svg, "line", { class: "target", x1: at, x2: at, y1: TOP - 8, y2: bottom });
    node(svg, "text", { class: "strong small", x: at + 4, y: TOP + 2 }, spec.limit.words);
  }

  function draw(figure) {
    const spec = data.charts[figure.dataset.chart];
    if (spec.kind === "bars") return histogram(figure, spec);
    const tall = spec.tall ? 250 : 170, [svg, width] = frame(figure, spec, tall);
    const [x, y, bottom] = scales(svg, spec, width, tall);
    if (spec.kind === "stack") stacks(svg, spec, x, y); else lines(svg, spec, x, y);
    marks(svg, x, bottom);
    pointing(svg, spec, x, width, bottom);
    for (const flag of svg.querySelectorAll(".flag")) svg.appendChild(flag);
  }

  // ---- the same as a table

  function row(parent, cell, cells) {
    const made = html(parent, "tr");
    cells.forEach((words, i) => {
      const one = html(made, i ? cell : "th", "", words);
      if (!i || cell === "th") one.scope = cell === "th" ? "col" : "row";
    });
  }

  function tables(box, spec) {
    if (spec.kind === "bars") {
      const table = html(box, "table");
      row(html(table, "thead"), "th", ["staleness", "trajectories", "share"]);
      const body = html(table, "tbody");
      spec.names.forEach((name, i) => row(body, "td", [name, said(spec.values[i]), said(spec.shares[i], "percent")]));
      return;
    }
    for (const name of [...new Set(spec.series.map((series) => series.set || "steps"))]) {
      const own = spec.series.filter((series) => (series.set || "steps") === name), table = html(box, "table");
      html(table, "caption", "", spec.label);
      row(html(table, "thead"), "th", ["", "wall s", "trajectories", ...own.map((series) => series.name)]);
      const body = html(table, "tbody");
      data.xs[name].step.forEach((_, i) => row(body, "td", [label(name, i), said(data.xs[name].seconds[i]),
        said(Math.max(0, data.xs[name].trajectories[i])),
        ...own.map((series) => value(spec, series, i))]));
    }
  }

  // ---- all of it

  const figures = [...document.querySelectorAll("figure[data-chart]")];
  for (const figure of figures) {
    const spec = data.charts[figure.dataset.chart];
    html(figure, "div", "place");
    if (spec.series && (spec.series.length > 1 || spec.kind === "stack")) {
      const keys = html(figure, "div", "legend");
      for (const series of spec.series) {
        const key = html(keys, "span");
        html(key, "span", "dot " + series.css);
        key.append(series.name);
      }
    }
    const button = html(figure, "button", "choice plain", "table");
    button.type = "button";
    button.setAttribute("aria-label", `${spec.label} as a table`);
    button.setAttribute("aria-expanded", "false");
    button.addEventListener("click", () => {
      const shown = figure.querySelector(".figures");
      button.setAttribute("aria-expanded", String(!shown));
      if (shown) return shown.remove();
      const box = html(figure, "div", "figures");
      box.tabIndex = 0;
      tables(box, spec);
    });
  }
  const all = () => { for (const figure of figures) if (figure.checkVisibility()) draw(figure); };
  for (const input of document.querySelectorAll("input[name=axis]")) {
    if (input.checked) axis = input.value;
    input.addEventListener("change", () => { axis = input.value; all(); });
  }
  for (const folded of document.querySelectorAll("details")) folded.addEventListener("toggle", all);
  addEventListener("resize", all);
  all();
  document.body.dataset.drawn = "true";
})();
"""
