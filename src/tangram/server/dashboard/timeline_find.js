// Timeline find: search by id, and stepping through the matches. Owns the search field, which rows match, and how
// an action is scrolled into view.

import {attr, el, put} from "./dom.js";
import {counted, duration, words} from "./format.js";
import {AXIS, scale, topOf} from "./timeline_paint.js";
import {showActionTooltip} from "./timeline_point.js";
import {announce} from "./tooltip.js";

export class Finder {
  constructor(timeline) {
    this.timeline = timeline;
    this.rows = timeline.rows;
    this.place = timeline.place;
    this.matches = null;
    this.matched = "";
    this.matchCount = el("span", "note");
    this.input = el("input", "search");
    this.input.type = "search";
    this.input.placeholder = "Find by id";
    this.input.setAttribute("aria-label", "Find actions by id");
    this.input.addEventListener("input", () => {
      this.place.keep({find: this.input.value});
      timeline.schedule();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.next(event.shiftKey ? -1 : 1);
    });
  }

  takePlace() {
    if (this.input.value !== this.place.find) this.input.value = this.place.find;
  }

  /** Computes the matching rows when rows or search changed. */
  match() {
    const text = this.place.find.trim().toLowerCase();
    const {live, canvas} = this.timeline;
    const isOne = (id) => id.toLowerCase().includes(text);
    for (const action of live) action.matches = isOne(action.id);
    const key = `${text}\u0000${this.rows.version}`;
    if (key === this.matched) return;
    this.matched = key;
    this.matches = null;
    attr(canvas, "data-matches", text || null);
    put(this.matchCount, "");
    if (!text) return;
    const matches = Uint8Array.from({length: this.rows.length}, (_, k) => (isOne(this.rows.id(k)) ? 1 : 0));
    const number = matches.reduce((sum, one) => sum + one, 0) + live.filter((action) => action.matches).length;
    put(this.matchCount, number ? counted(number, "match", "matches") : "no match");
    if (number) this.matches = matches; // Without a match nothing is faded.
  }

  next(step) {
    this.match();
    if (!this.matches) return;
    const {run} = this.place;
    const indices = [];
    this.matches.forEach((one, k) => one && (!run || this.rows.record(k).run === run) && indices.push(k));
    if (!indices.length) return;
    const at = indices.findIndex((k) => this.rows.id(k) === this.timeline.hovered);
    this.focus(indices[(at + step + indices.length) % indices.length]);
  }

  /** The next or previous visible action. */
  walk(step) {
    const {plan, hovered} = this.timeline;
    if (!plan?.count) return;
    const order = Array.from(plan.picked.subarray(0, plan.count))
      .sort((a, b) => this.rows.submitted[a] - this.rows.submitted[b] || a - b);
    const at = order.findIndex((k) => this.rows.id(k) === hovered);
    this.focus(order[Math.min(order.length - 1, Math.max(0, at + step))]);
  }

  /** Scrolls an action into view, marks it and announces it. */
  focus(row) {
    const {timeline, rows} = this;
    timeline.point(rows.id(row));
    this.bring(row);
    const place = this.placeOf(row);
    if (!place) return;
    Object.assign(timeline.canvas.dataset, {focusX: place.x.toFixed(1), focusY: place.y.toFixed(1)});
    const record = rows.record(row);
    announce(`${record.id}, ${words(record.status)}, ${duration(record.ended_s - record.submitted_s)}`);
    const corner = timeline.canvas.getBoundingClientRect();
    showActionTooltip(corner.left + place.x, corner.top + place.y, record);
  }

  bring(row) {
    const {timeline, rows} = this;
    const [begin, end] = [rows.submitted[row], rows.ended[row]];
    const {from, to} = timeline.range;
    if (end < from || begin > to || end - begin < (to - from) / 200) {
      const around = Math.max((end - begin) * 4, 1);
      timeline.change(() => timeline.range.place(begin - around, end + around));
    }
    timeline.draw();
    const place = this.placeOf(row);
    if (place && (place.y < AXIS || place.y > timeline.height)) {
      timeline.scroll += place.y - timeline.height / 2;
      timeline.draw();
    }
  }

  /** The middle of its visible part. */
  placeOf(row) {
    const {plan, frame, width} = this.timeline;
    const k = plan.picked.subarray(0, plan.count).indexOf(row);
    if (k < 0) return null;
    const x = scale(frame);
    const [left, right] = [Math.max(frame.left, x(this.rows.submitted[row])), Math.min(width, x(this.rows.ended[row]))];
    const top = topOf(plan, frame, plan.groupOfRun[this.rows.run[row]], plan.lanes[k]);
    return {x: (left + right) / 2, y: top + plan.laneHeight / 2};
  }
}
