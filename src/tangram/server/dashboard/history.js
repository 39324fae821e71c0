// History: the three charts of the overview: completion times, their parts, and the use of each pool.
// Owns their range of time. For one run the first two are computed from its rows.

import {Chart} from "./charts.js";
import {attr, box, button, el} from "./dom.js";
import {axisDuration, duration, percent} from "./format.js";
import {historyOf, thinned} from "./past.js";
import {lasting} from "./pools.js";

const SPANS = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const POINTS = 90;
const COLOURS = 8;

const PERCENTILES = [["p50", "percentile-50"], ["p95", "percentile-95"], ["p99", "percentile-99"]].map(
  ([key, colour]) => ({key, label: key, colour, value: (point) => point[`${key}_s`]}));
const PARTS = ["waiting", "overhead", "execution"].map(
  (key) => ({key, label: key, colour: `part-${key}`, value: (point) => point[`${key}_s`]}));

export class History {
  constructor(changed) {
    this.span = SPANS[1][0];
    this.act = new Chart({
      title: "Action completion time", scale: "log", unit: duration, axis: axisDuration,
      empty: "Percentiles of completion times are shown here once the first actions have ended.",
    });
    this.split = new Chart({
      title: "Where it goes", scale: "linear", stacked: true, unit: duration, axis: axisDuration,
      hint: "mean per action",
      empty: "Waiting, overhead and execution are shown here once the first actions have ended.",
    });
    this.use = new Chart({
      title: "Use of pools", scale: "part", unit: percent,
      empty: "The held or spent part of each pool is shown here after the first seconds.",
    });
    this.buttons = SPANS.map(([span, text]) => {
      const node = button("", text);
      node.addEventListener("click", () => {
        this.span = span;
        changed();
      });
      return [span, node];
    });
    const choice = box("div", "segmented", ...this.buttons.map(([, node]) => node));
    choice.setAttribute("role", "group");
    choice.setAttribute("aria-label", "Stretch of time of the charts");
    this.root = box("div", "history", box("div", "section-head", el("h2", "", "History"), choice),
      box("div", "charts", this.act.root, this.split.root, this.use.root));
  }

  update({view, rows, place}) {
    for (const [span, node] of this.buttons) attr(node, "aria-pressed", span === this.span);
    const now = view.now_s;
    const offset = view.at - now;
    const of = (history) => thinned(history, now, this.span, POINTS);
    const all = of(view.history);
    const own = place.run ? of(historyOf(rows, place.run, now)) : all;
    const from = now - this.span;
    this.act.note.textContent = place.run ? "of this run, log scale" : "log scale";
    this.act.update(PERCENTILES, own.points, from, now, offset);
    this.split.update(PARTS, own.points, from, now, offset);
    this.use.note.textContent = place.run ? "all runs" : "held or spent";
    this.use.update(poolSeries(lasting(view.pools)), all.points, from, now, offset);
  }
}

function poolSeries(pools) {
  return pools.slice(0, COLOURS).map((pool, k) => ({
    key: pool.name, label: pool.name, colour: `pool-${k}`, value: (point) => point.busy[pool.name],
  }));
}
