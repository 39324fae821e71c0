// Interactive charts: drawn along the axis that the reader selects, and as tables; see reports/interactive.py for the
// data. A chart is drawn for the width of its figure, so that its text is as large on a phone as elsewhere.

(() => {
  const data = kit.data("charts-data");
  const { html, number: text, ticks } = kit;
  const NS = "http://www.w3.org/2000/svg";
  const LEFT = 50, RIGHT = 10, TOP = 14, BOTTOM = 24;
  const MAIN = Object.keys(data.xs)[0];  // the set of points that bars and most curves have
  const DENSE = 60;  // points of one curve, beyond which they would hide each other
  let axis = Object.keys(data.axes)[0];

  const node = (parent, name, attributes, words) => {
    const made = document.createElementNS(NS, name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (words !== undefined) made.textContent = words;
    parent.appendChild(made);
    return made;
  };

  // ---- scales

  const set = (series) => data.xs[series.set || MAIN];
  const label = (name, i) => data.xs[name].labels[i];

  function range(spec) {
    let low = Infinity, high = -Infinity;
    const see = (x) => { if (x === null || x === undefined) return; low = Math.min(low, x); high = Math.max(high, x); };
    data.xs[MAIN][axis].forEach(see);
    data.xs[MAIN].from[axis].forEach(see);
    if (spec.shaded) data.shade.span[axis].forEach(see);
    for (const series of spec.series) set(series)[axis].forEach(see);
    if (high === -Infinity) return [0, 1];
    return high > low ? [low, high] : [low, low + 1];
  }

  function heights(spec) {
    let low = 0, high = spec.high || 0;
    const count = data.xs[MAIN][axis].length;
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
    if (spec.shaded) {
      const from = x(Math.max(left, data.shade.span[axis][0])), to = x(data.shade.span[axis][1]);
      node(svg, "rect", { class: "shade", x: from, y: TOP, width: Math.max(0, to - from), height: bottom - TOP });
      if (to - from > 62) node(svg, "text", { class: "small faint", x: from + 4, y: TOP + 11 }, data.shade.label);
    }
    for (const tick of ticks(low, high, tall > 200 ? 5 : 4).values) {
      node(svg, "line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) });
      const words = text(tick, spec.format).replace(" ", "\u00a0");
      node(svg, "text", { class: "tick", x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, words);
    }
    for (const tick of ticks(Math.max(0, left), right, Math.max(2, Math.floor(width / 90))).values) {
      const unit = data.units[axis];
      if (!unit && !Number.isInteger(tick)) continue;
      const anchor = x(tick) > width - 30 ? "end" : "middle", words = tick.toLocaleString("en");
      node(svg, "text", { class: "tick", x: x(tick), y: tall - 6, "text-anchor": anchor },
        unit ? words + " " + unit : words);
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
    const xs = data.xs[MAIN][axis], from = data.xs[MAIN].from[axis];
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
    const sets = [...new Set(spec.series.map((series) => series.set || MAIN))];
    over.addEventListener("mousemove", (event) => {
      const at = (event.clientX - svg.getBoundingClientRect().left) * width / svg.getBoundingClientRect().width;
      let best = null;
      for (const name of sets) data.xs[name][axis].forEach((value, i) => {
        const middle = spec.kind === "stack" ? (x(value) + x(data.xs[MAIN].from[axis][i])) / 2 : x(value);
        const far = Math.abs(middle - at);
        if (!best || far < best.far) best = { far, name, i, middle };
      });
      if (!best) return;
      cross.setAttribute("x1", best.middle); cross.setAttribute("x2", best.middle);
      cross.setAttribute("visibility", "visible");
      const lines = [label(best.name, best.i)];
      if (axis !== Object.keys(data.axes)[0]) lines.push(`${data.axes[axis]}: ${text(data.xs[best.name][axis][best.i])}`);
      for (const series of spec.series) {
        if ((series.set || MAIN) !== best.name || series.y[best.i] === null) continue;
        lines.push(`${series.name}: ${value(spec, series, best.i)}`);
      }
      over.dataset.tip = lines.join("\n");
    });
    over.addEventListener("mouseleave", () => cross.setAttribute("visibility", "hidden"));
  }

  function value(spec, series, i) {
    const error = series.error && series.error[i];
    return text(series.y[i], spec.format) + (error ? " ± " + text(error, spec.format) : "");
  }

  function histogram(figure, spec) {
    const tall = 190, [svg, width] = frame(figure, spec, tall);
    const most = Math.max(1, ...spec.values), count = Math.max(spec.names.length, spec.limit.after + 2);
    const wide = (width - 2 * RIGHT) / count, bottom = tall - BOTTOM, top = TOP + 14;
    spec.names.forEach((name, i) => {
      const high = spec.values[i] / most * (bottom - top), left = RIGHT + i * wide, x = left + wide / 2;
      const share = text(spec.shares[i], "percent");
      node(svg, "rect", {
        class: `bars ${i > spec.limit.after ? "k4" : "p1"}`, x: left + wide * 0.1, y: bottom - high, width: wide * 0.8,
        height: high, "data-tip": `${spec.heads[0]} ${name}: ${text(spec.values[i])} ${spec.heads[1]}, ${share}`,
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

  // ---- tables

  function row(parent, cell, cells) {
    const made = html(parent, "tr");
    cells.forEach((words, i) => {
      const one = html(made, i ? cell : "th", "", words);
      if (!i || cell === "th") one.scope = cell === "th" ? "col" : "row";
    });
  }

  function tables(box, spec) {
    const others = Object.keys(data.axes).slice(1);
    if (spec.kind === "bars") {
      const table = html(box, "table");
      row(html(table, "thead"), "th", [...spec.heads, "share"]);
      const body = html(table, "tbody");
      spec.names.forEach((name, i) => row(body, "td", [name, text(spec.values[i]), text(spec.shares[i], "percent")]));
      return;
    }
    for (const name of [...new Set(spec.series.map((series) => series.set || MAIN))]) {
      const own = spec.series.filter((series) => (series.set || MAIN) === name), table = html(box, "table");
      html(table, "caption", "", spec.label);
      row(html(table, "thead"), "th", ["", ...others.map((other) => data.axes[other]), ...own.map((series) => series.name)]);
      const body = html(table, "tbody");
      data.xs[name].labels.forEach((_, i) => row(body, "td", [label(name, i),
        ...others.map((other) => text(Math.max(0, data.xs[name][other][i]))),
        ...own.map((series) => value(spec, series, i))]));
    }
  }

  // ---- start

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
