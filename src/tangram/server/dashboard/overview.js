// Overview: the first page. Owns the row of numbers; the panels below belong to their modules.

import {attr, box, el, put} from "./dom.js";
import {count, counted, duration, number, words} from "./format.js";
import {History} from "./history.js";
import {percentilesSince} from "./past.js";
import {Pools} from "./pools.js";
import {QueueFront} from "./queue.js";
import {RunBars} from "./runs.js";

const MINUTE_S = 60;
const RECENT_S = 300;

export class OverviewPage {
  constructor(changed) {
    this.tiles = new Map();
    this.numbers = el("div", "tiles");
    for (const [key, title] of [["running", "Running"], ["waiting", "Waiting"], ["ended", "Ended per second"],
      ["p50", "ACT p50"], ["p95", "ACT p95"], ["p99", "ACT p99"], ["failed", "Did not succeed"]]) this.tile(key, title);
    this.pools = new Pools();
    this.history = new History(changed);
    this.runs = new RunBars();
    this.queue = new QueueFront();
    this.root = box("div", "page", this.numbers, this.pools.root, this.history.root, this.runs.root, this.queue.root);
  }

  tile(key, title) {
    const value = el("b");
    const aside = el("small");
    const node = box("div", "tile", el("span", "", title), value, aside);
    node.dataset.tile = key;
    this.tiles.set(key, {node, value, aside});
    this.numbers.append(node);
  }

  set(key, value, aside) {
    put(this.tiles.get(key).value, value);
    put(this.tiles.get(key).aside, aside);
    attr(this.tiles.get(key).aside, "title", aside);
  }

  update(state) {
    const {view, rows, place} = state;
    const runs = place.run ? view.runs.filter((run) => run.name === place.run) : view.runs;
    const sum = (key) => runs.reduce((total, run) => total + run[key], 0);
    this.set("running", count(place.run ? sum("running") : view.running_total), counted(runs.length, "run"));
    this.set("waiting", count(place.run ? sum("waiting") : view.waiting_total), longest(view, place.run));
    const minute = percentilesSince(rows, place.run, view.now_s - MINUTE_S);
    const perSecond = minute.count / Math.min(MINUTE_S, Math.max(1, view.now_s));
    this.set("ended", number(perSecond), `${count(minute.count)} in the last minute`);
    const recent = percentilesSince(rows, place.run, view.now_s - RECENT_S);
    for (const key of ["p50", "p95", "p99"]) {
      this.set(key, recent.count ? duration(recent[`${key}_s`]) : "–", recent.count ? "last 5 min" : "nothing ended");
    }
    this.failures(runs);
    for (const part of [this.pools, this.history, this.runs, this.queue]) part.update(state);
  }

  failures(runs) {
    const ends = new Map();
    let total = 0;
    for (const run of runs) {
      for (const [status, n] of Object.entries(run.settled)) {
        total += n;
        if (status !== "succeeded" && n) ends.set(status, (ends.get(status) ?? 0) + n);
      }
    }
    const most = [...ends].sort((a, b) => b[1] - a[1]);
    const others = most.reduce((sum, [, n]) => sum + n, 0);
    const aside = others ? most.map(([status, n]) => `${count(n)} ${words(status)}`).join(", ") : `of ${count(total)}`;
    this.set("failed", count(others), aside);
  }
}

function longest(view, run) {
  const since = view.waiting.filter((action) => !run || action.run === run).map((action) => action.since_s);
  return since.length ? `longest ${duration(Math.max(0, view.now_s - Math.min(...since)))}` : "nothing waits";
}
