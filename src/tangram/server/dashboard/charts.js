// Charts: lines and stacked areas over time, as SVG. Owns scales, ticks and the cursor that reads values; colours come
// from the style sheet by class. A chart is created once and changed in place.

import {attr, box, el, keyed, panel, put, putName, show, svg} from "./dom.js";
import {timeOfDay} from "./format.js";
import {ticks} from "./range.js";
import {hideTooltip, showTooltip} from "./tooltip.js";

const HEIGHT = 168;
const LEFT = 50;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;

/** Series are {key, label, colour, value(point)}; `scale` is "linear", "log" or "part" (from 0 to 1). */
export class Chart {
  constructor({title, scale, stacked = false, unit, axis = unit, empty, hint = ""}) {
    Object.assign(this, {scale, stacked, unit, axis});
    const {root, body, note} = panel(title, "chart");
    this.root = root;
    this.note = note;
    put(note, hint);
    this.legend = el("div", "legend");
    this.drawing = svg("svg", {role: "img", tabindex: "0", height: HEIGHT});
    this.grid = svg("g");
    this.areas = svg("g");
    this.cursor = svg("line", {class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden"});
    this.drawing.append(this.grid, this.areas, this.cursor);
    this.empty = el("p", "empty over", empty);
    body.append(this.legend, box("div", "drawing", this.drawing, this.empty));
    this.title = title;
    this.width = 0;
    this.at = -1;
    new ResizeObserver(() => this.resize()).observe(body);
    this.listen();
  }

  resize() {
    const width = this.drawing.parentNode.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    attr(this.drawing, "viewBox", `0 0 ${width} ${HEIGHT}`);
    if (this.shown) this.update(...this.shown);
  }

  /** Points have `middle_s`; `from` and `now` are in the service's seconds, `offset` leads to 1970. */
  update(series, points, from, now, offset) {
    this.shown = [series, points, from, now, offset];
    if (!this.width) return;
    const used = points.filter((point) => series.some((one) => isNumber(one.value(point))));
    show(this.empty, used.length === 0);
    attr(this.grid, "visibility", used.length ? "visible" : "hidden");
    this.x = (s) => LEFT + ((s - from) / (now - from)) * (this.width - LEFT - RIGHT);
    const {y, marks} = this.scaleOf(series, used);
    this.frame(marks, y, from, now, offset);
    this.draw(series, points, y);
    this.label(series, used);
    if (this.at >= 0) this.point(this.at);
  }

  scaleOf(series, points) {
    const values = points.flatMap((point) => {
      const values = series.map((one) => one.value(point)).filter(isNumber);
      return this.stacked ? [values.reduce((a, b) => a + b, 0)] : values;
    });
    const inner = HEIGHT - TOP - BOTTOM;
    const most = Math.max(...values, 0);
    if (this.scale === "log") return logScale(values, inner);
    const {top, step} = this.scale === "part" ? {top: 1, step: 0.25} : nice(most);
    const marks = [];
    for (let value = 0; value <= top * 1.0001; value += step) marks.push(value);
    return {y: (value) => TOP + inner * (1 - Math.min(1, value / top)), marks};
  }

  frame(marks, y, from, now, offset) {
    const lines = marks.map((value) => ({key: `y ${value}`, y: y(value), text: this.axis(value)}));
    const {step, values} = ticks(from + offset, now + offset, (this.width - LEFT) / 90);
    for (const at of values) {
      const x = this.x(at - offset);
      if (x > this.width - 24 || x < LEFT + 10) continue;
      lines.push({key: `x ${at}`, x, text: step >= 60 ? timeOfDay(at).slice(0, 5) : timeOfDay(at)});
    }
    keyed(this.grid, lines, (line) => line.key, gridLine, (node, line) => {
      const [rule, text] = node.children;
      const isRow = line.y !== undefined;
      const [x1, x2, y1, y2] = isRow ? [LEFT, this.width - RIGHT, line.y, line.y]
        : [line.x, line.x, HEIGHT - BOTTOM, HEIGHT - BOTTOM + 4];
      for (const [key, value] of Object.entries({x1, x2, y1, y2})) attr(rule, key, value.toFixed(1));
      attr(text, "x", (isRow ? LEFT - 6 : line.x).toFixed(1));
      attr(text, "y", (isRow ? line.y + 4 : HEIGHT - 4).toFixed(1));
      attr(text, "text-anchor", isRow ? "end" : "middle");
      put(text, line.text);
    });
  }

  draw(series, points, y) {
    const base = points.map(() => 0);
    const paths = series.map((one) => {
      const values = points.map((point) => one.value(point));
      if (!this.stacked) return {...one, d: linePath(points, values, this.x, y)};
      const lower = base.slice();
      values.forEach((value, k) => (base[k] += value ?? 0));
      return {...one, d: areaPath(points, values, lower, base, this.x, y)};
    });
    keyed(this.areas, paths, (one) => one.key, () => svg("path"), (node, one) => {
      attr(node, "class", `${this.stacked ? "area" : "curve"} ${one.colour}`);
      attr(node, "d", one.d);
    });
  }

  label(series, points) {
    const last = points.at(-1);
    keyed(this.legend, series, (one) => one.key,
      () => box("span", "", el("i", "swatch"), el("span", "series"), el("b")),
      (node, one) => {
        attr(node.children[0], "class", `swatch ${one.colour}`);
        putName(node.children[1], one.label);
        const value = last ? one.value(last) : null;
        put(node.children[2], isNumber(value) ? this.unit(value) : "–");
      });
    const values = series.map((one) => {
      const value = last ? one.value(last) : null;
      return `${one.label} ${isNumber(value) ? this.unit(value) : "unknown"}`;
    });
    attr(this.drawing, "aria-label", `${this.title}, latest: ${values.join(", ")}. Arrows read earlier values.`);
  }

  // The cursor.

  listen() {
    this.drawing.addEventListener("pointermove", (event) => {
      if (!this.shown || !this.shown[1].length) return;
      const points = this.shown[1];
      let best = 0;
      points.forEach((point, k) => {
        const away = (index) => Math.abs(this.x(points[index].middle_s) - event.offsetX);
        if (away(k) < away(best)) best = k;
      });
      this.at = best;
      this.point(best);
    });
    this.drawing.addEventListener("pointerleave", () => this.unpoint());
    this.drawing.addEventListener("blur", () => this.unpoint());
    this.drawing.addEventListener("keydown", (event) => {
      const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
      if (!step || !this.shown?.[1].length) return;
      event.preventDefault();
      const last = this.shown[1].length - 1;
      this.at = this.at < 0 ? last : Math.min(last, Math.max(0, this.at + step));
      this.point(this.at);
    });
  }

  point(at) {
    const [series, points, , , offset] = this.shown;
    const point = points[Math.min(at, points.length - 1)];
    if (!point) return;
    const x = this.x(point.middle_s);
    attr(this.cursor, "x1", x.toFixed(1));
    attr(this.cursor, "x2", x.toFixed(1));
    attr(this.cursor, "visibility", "visible");
    const lines = series.map((one) => {
      const value = one.value(point);
      return [one.label, isNumber(value) ? this.unit(value) : "–", one.colour];
    });
    if (point.ended !== undefined && this.scale !== "part") lines.push(["ended", String(point.ended)]);
    const corner = this.drawing.getBoundingClientRect();
    showTooltip(corner.left + x, corner.top + 20, timeOfDay(point.from_s + offset), lines);
  }

  unpoint() {
    if (this.at < 0) return;
    this.at = -1;
    attr(this.cursor, "visibility", "hidden");
    hideTooltip();
  }
}

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function gridLine() {
  const node = svg("g");
  node.append(svg("line", {class: "gridline"}), svg("text"));
  return node;
}

function nice(most) {
  if (!(most > 0)) return {top: 1, step: 0.5};
  const rough = most / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= rough);
  return {top: Math.ceil(most / step) * step, step};
}

function logScale(values, inner) {
  const positive = values.filter((value) => value > 0);
  const least = positive.length ? Math.min(...positive) : 0.1;
  const most = positive.length ? Math.max(...positive) : 10;
  const all = [];
  for (let power = -6; power <= 7; power += 1) for (const k of [1, 2, 5]) all.push(k * 10 ** power);
  const first = Math.max(0, all.findLastIndex((mark) => mark <= least));
  const last = all.findIndex((mark) => mark >= most);
  const marks = all.slice(first, Math.max(last < 0 ? all.length : last, first + 2) + 1);
  const [low, high] = [Math.log(marks[0]), Math.log(marks.at(-1))];
  const y = (value) => {
    const part = (Math.log(Math.max(value, marks[0])) - low) / (high - low);
    return TOP + inner * (1 - Math.min(1, part));
  };
  const sparse = (mark, k) => mark.toExponential().startsWith("1e") || k === marks.length - 1;
  return {y, marks: marks.length > 6 ? marks.filter(sparse) : marks};
}

/** Interrupted where no action ended. */
function linePath(points, values, x, y) {
  let d = "";
  let pen = false;
  points.forEach((point, k) => {
    if (!isNumber(values[k])) {
      pen = false;
      return;
    }
    d += `${pen ? "L" : "M"}${x(point.middle_s).toFixed(1)} ${y(values[k]).toFixed(1)}`;
    if (!pen && !isNumber(values[k + 1])) d += "h0.1"; // A point between gaps is seen as a dot.
    pen = true;
  });
  return d;
}

function areaPath(points, values, lower, upper, x, y) {
  let d = "";
  for (let first = 0; first < points.length; first += 1) {
    if (!isNumber(values[first])) continue;
    let end = first;
    while (end < points.length && isNumber(values[end])) end += 1;
    const alone = end - first === 1;
    const at = (k, side) => (x(points[k].middle_s) + (alone ? side * 1.5 : 0)).toFixed(1);
    const along = [];
    for (let k = first; k < end; k += 1) along.push(`${at(k, -1)} ${y(upper[k]).toFixed(1)}`);
    if (alone) along.push(`${at(first, 1)} ${y(upper[first]).toFixed(1)}`);
    for (let k = end - 1; k >= first; k -= 1) along.push(`${at(k, 1)} ${y(lower[k]).toFixed(1)}`);
    if (alone) along.push(`${at(first, -1)} ${y(lower[first]).toFixed(1)}`);
    d += `M${along.join("L")}Z`;
    first = end;
  }
  return d;
}
