// Minimap: all remembered time in a strip, with the number of ends as height and the range of the timeline.
// Owns its canvas. Dragging the range moves it, dragging beside it selects another, a double click shows everything.

import {canvasColours} from "./palette.js";

const HEIGHT = 40;
const COLUMN = 3;

export class Minimap {
  /** `chosen(from, to)` receives the selected range in seconds; `reset()` selects everything. */
  constructor(chosen, reset) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = "minimap";
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "All remembered time; the marked stretch is what the timeline shows");
    this.chosen = chosen;
    this.width = 0;
    this.bins = new Float32Array(0);
    this.counted = "";
    this.drag = null;
    this.canvas.addEventListener("pointerdown", (event) => this.down(event));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerup", (event) => this.up(event));
    this.canvas.addEventListener("pointercancel", () => (this.drag = null));
    this.canvas.addEventListener("dblclick", reset);
  }

  resize(width, ratio) {
    this.width = width;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(HEIGHT * ratio);
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.counted = "";
  }

  draw(rows, range, run) {
    if (!this.width) return;
    this.range = range;
    this.start = range.start;
    this.end = Math.max(range.now, range.start + 1);
    this.count(rows, run);
    const colours = canvasColours();
    const context = this.context;
    context.clearRect(0, 0, this.width, HEIGHT);
    const most = this.bins.reduce((a, b) => Math.max(a, b), 1);
    context.fillStyle = colours.soft;
    this.bins.forEach((n, k) => {
      if (!n) return;
      const high = Math.max(1.5, (n / most) * (HEIGHT - 10));
      context.fillRect(k * COLUMN, HEIGHT - 2 - high, COLUMN - 1, high);
    });
    const left = Math.max(0, this.x(range.from));
    const right = Math.min(this.width, this.x(range.to));
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.16;
    context.fillRect(left, 0, Math.max(2, right - left), HEIGHT);
    context.globalAlpha = 1;
    context.fillRect(left, 0, 2, HEIGHT);
    context.fillRect(Math.max(left, right - 2), 0, 2, HEIGHT);
  }

  /** Counts the ends in each column when rows, time or filter changed. */
  count(rows, run) {
    const key = `${rows.version} ${this.start} ${this.end} ${run}`;
    if (key === this.counted) return;
    this.counted = key;
    this.bins = new Float32Array(Math.max(1, Math.ceil(this.width / COLUMN)));
    const per = this.bins.length / (this.end - this.start);
    const wanted = run ? rows.runs.numbers.get(run) ?? -1 : -2;
    for (let k = 0; k < rows.length; k += 1) {
      if (wanted !== -2 && rows.run[k] !== wanted) continue;
      const bin = Math.floor((rows.ended[k] - this.start) * per);
      if (bin >= 0) this.bins[Math.min(bin, this.bins.length - 1)] += 1;
    }
  }

  x(s) {
    return ((s - this.start) / (this.end - this.start)) * this.width;
  }

  second(event) {
    return this.start + (event.offsetX / this.width) * (this.end - this.start);
  }

  down(event) {
    if (event.button !== 0 || !this.range) return;
    this.canvas.setPointerCapture(event.pointerId);
    const at = this.second(event);
    const inside = at >= this.range.from && at <= this.range.to && this.range.mode !== "all";
    this.drag = {at, x: event.offsetX, inside, from: this.range.from, to: this.range.to};
  }

  move(event) {
    if (!this.drag || Math.abs(event.offsetX - this.drag.x) < 3) return;
    const at = this.second(event);
    const {inside, from, to} = this.drag;
    if (inside) this.chosen(from + at - this.drag.at, to + at - this.drag.at);
    else this.chosen(Math.min(at, this.drag.at), Math.max(at, this.drag.at));
  }

  up(event) {
    if (!this.drag) return;
    const still = Math.abs(event.offsetX - this.drag.x) < 3;
    if (still && !this.drag.inside && this.range.mode !== "all") {
      const half = (this.range.to - this.range.from) / 2;
      this.chosen(this.drag.at - half, this.drag.at + half);
    }
    this.drag = null;
  }
}
