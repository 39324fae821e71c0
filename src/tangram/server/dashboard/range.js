// Range: the range of time that the timeline shows, in the service's seconds. It follows the present (`recent`), contains
// everything (`all`), or stays fixed (`fixed`).

export const RECENT_S = 300;
const SPAN_MIN_S = 0.002;
const MARGIN = 0.02;
/* Beside the present, as a part of the span: a margin to the edge. */

export class Range {
  constructor() {
    this.start = 0;
    this.now = 1;
    this.recent();
  }

  /** Time passed, or rows were added. */
  settle(start, now) {
    this.start = Math.min(start, now - 1);
    this.now = now;
    if (this.mode === "recent") {
      this.to = now + this.span * MARGIN;
      this.from = this.to - this.span;
    } else if (this.mode === "all") {
      const length = now - this.start;
      this.from = this.start - length * MARGIN;
      this.to = now + length * MARGIN;
    }
  }

  recent(span = RECENT_S) {
    this.mode = "recent";
    this.span = span;
    this.settle(this.start, this.now);
  }

  all() {
    this.mode = "all";
    this.settle(this.start, this.now);
  }

  set(from, to) {
    this.mode = "fixed";
    this.from = from;
    this.to = Math.max(to, from + SPAN_MIN_S);
  }

  /** `factor` below 1 zooms in; the moment `at` stays where it is. */
  zoom(factor, at) {
    const before = this.to - this.from;
    const whole = (this.now - this.start) * (1 + 2 * MARGIN);
    const after = Math.min(Math.max(before * factor, SPAN_MIN_S), Math.max(whole, RECENT_S));
    const from = at - (at - this.from) * (after / before);
    this.place(from, from + after);
  }

  pan(by) {
    this.place(this.from + by, this.to + by);
  }

  /** Keeps a moment visible, and follows the present again when it is reached. */
  place(from, to) {
    const span = to - from;
    const margin = span * MARGIN;
    if (from <= this.start && to >= this.now) return this.all();
    if (to >= this.now + margin * 0.5) return this.recent(span);
    const low = Math.min(this.start - margin, this.now - span);
    const left = Math.max(from, low);
    return this.set(left, left + span);
  }
}

const STEPS_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900,
  1800, 3600, 7200, 14400, 43200, 86400];

/** About the given number of round moments in local time; in seconds since 1970, with the step between them. */
export function ticks(from, to, about) {
  const rough = (to - from) / Math.max(1, about);
  const step = STEPS_S.find((s) => s >= rough) ?? STEPS_S.at(-1);
  const zone = step >= 3600 ? new Date(from * 1000).getTimezoneOffset() * 60 : 0;
  const values = [];
  for (let k = Math.ceil((from - zone) / step); k * step + zone <= to; k += 1) values.push(k * step + zone);
  return {step, values};
}
