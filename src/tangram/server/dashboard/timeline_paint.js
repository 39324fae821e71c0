// Timeline paint: draws the layout on a canvas. Owns the pixels: parts of an action by tone, marks for those that did
// not succeed, the axis. Draws thousands of rows in a few milliseconds: bars are written as plain pixels, and rows
// thinner than a pixel become one column per lane with the tone of the longest part.

import {canvasColours, colourNumber} from "./palette.js";
import {STATUSES} from "./rows.js";
import {HEAD} from "./lanes.js";
import {timeOfDay} from "./format.js";
import {Pixels} from "./pixels.js";
import {ticks} from "./range.js";

export const AXIS = 24;
/* The height of the time axis. */
const MARKED_FROM = STATUSES.indexOf("timed_out");

const WAITING = 0;
const OVERHEAD = 1;
const EXECUTION = 2;

const pixels = new Pixels();

/** Draws everything. `frame` has width, height, ratio, left (of the plot), scroll, range and offset to 1970. */
export function paint(context, rows, plan, frame, {matches, selected}) {
  const colours = canvasColours();
  context.clearRect(0, 0, frame.width, frame.height);
  const x = scale(frame);
  grid(context, frame, x, colours);
  for (const its of plan.groups) its.colour = colourNumber(its.run);
  context.save();
  context.beginPath();
  context.rect(frame.left, AXIS, frame.width - frame.left, frame.height - AXIS);
  context.clip();
  pixels.begin(frame.width, frame.height, frame.ratio);
  const merged = bars(rows, plan, frame, x, colours, matches);
  liveBars(plan, frame, x, colours, matches);
  pixels.show(context);
  marks(context, rows, plan, frame, x, colours, matches);
  present(context, frame, x, colours);
  outline(context, rows, plan, frame, x, colours, selected);
  context.restore();
  names(context, plan, frame, colours);
  scrollbar(context, plan, frame, colours);
  return merged;
}

export function scale(frame) {
  const perSecond = (frame.width - frame.left) / (frame.range.to - frame.range.from);
  return (s) => frame.left + (s - frame.range.from) * perSecond;
}

export function topOf(plan, frame, its, lane) {
  return AXIS + its.top + HEAD + lane * plan.laneHeight - frame.scroll;
}

function bars(rows, plan, frame, x, colours, matches) {
  const {picked, lanes, count, laneHeight} = plan;
  const thin = new Thin(plan);
  const high = laneHeight - (laneHeight > 6 ? 2 : 1);
  let merged = 0;
  for (let k = 0; k < count; k += 1) {
    const row = picked[k];
    const its = plan.groupOfRun[rows.run[row]];
    const y = topOf(plan, frame, its, lanes[k]);
    if (y + laneHeight < AXIS || y > frame.height) continue;
    const from = x(rows.submitted[row]);
    const to = x(rows.ended[row]);
    const faint = matches !== null && !matches[row];
    if (to - from < 1) {
      merged += 1;
      thin.add(its, lanes[k], y, high, from, rows, row, faint);
      continue;
    }
    bar(colours.tones[faint ? 1 : 0][its.colour], y, high, from, x(rows.submitted[row] + rows.waiting[row]),
      x(rows.submitted[row] + rows.waiting[row] + rows.overhead[row]), to);
  }
  thin.flush(colours);
  return merged;
}

function bar(tones, y, high, from, granted, begun, to) {
  pixels.fill(from, y, Math.min(granted, to), high, tones[WAITING]);
  pixels.fill(granted, y, Math.min(begun, to), high, tones[OVERHEAD]);
  pixels.fill(begun, y, to, high, tones[EXECUTION]);
}

/** Columns of a pixel for thinner rows. */
class Thin {
  constructor(plan) {
    const most = plan.laneTotal;
    this.base = new Map();
    let base = 0;
    for (const its of plan.groups) {
      this.base.set(its, base);
      base += its.lanes;
    }
    this.column = new Int32Array(most).fill(-1e9);
    this.spent = new Float64Array(most * 3);
    this.colour = new Int32Array(most);
    this.y = new Float32Array(most);
    this.faint = new Uint8Array(most);
    this.high = 1;
    this.full = [];
  }

  add(its, lane, y, high, at, rows, row, faint) {
    const slot = this.base.get(its) + lane;
    const column = Math.floor(at);
    if (this.column[slot] !== column) {
      if (this.column[slot] > -1e8) this.full.push(slot, this.column[slot], this.tone(slot), this.faint[slot]);
      this.column[slot] = column;
      this.spent.fill(0, slot * 3, slot * 3 + 3);
      this.colour[slot] = its.colour;
      this.y[slot] = y;
      this.faint[slot] = 1;
      this.high = high;
    }
    const waiting = rows.waiting[row];
    const overhead = rows.overhead[row];
    this.spent[slot * 3 + WAITING] += waiting;
    this.spent[slot * 3 + OVERHEAD] += overhead;
    this.spent[slot * 3 + EXECUTION] += rows.ended[row] - rows.submitted[row] - waiting - overhead;
    if (!faint) this.faint[slot] = 0;
  }

  /** The longest part. */
  tone(slot) {
    const at = slot * 3;
    let tone = EXECUTION;
    if (this.spent[at + WAITING] > this.spent[at + tone]) tone = WAITING;
    if (this.spent[at + OVERHEAD] > this.spent[at + tone]) tone = OVERHEAD;
    return tone;
  }

  flush(colours) {
    this.column.forEach((column, slot) => {
      if (column > -1e8) this.full.push(slot, column, this.tone(slot), this.faint[slot]);
    });
    for (let k = 0; k < this.full.length; k += 4) {
      const [slot, column, tone, faint] = [this.full[k], this.full[k + 1], this.full[k + 2], this.full[k + 3]];
      pixels.fill(column, this.y[slot], column + 1, this.high, colours.tones[faint][this.colour[slot]][tone]);
    }
  }
}

function liveBars(plan, frame, x, colours, matches) {
  const high = plan.laneHeight - (plan.laneHeight > 6 ? 2 : 1);
  for (const action of plan.live) {
    const its = plan.groups.find((one) => one.run === action.run);
    const y = topOf(plan, frame, its, action.lane);
    const granted = x(action.granted ?? action.until);
    const faint = matches !== null && !action.matches ? 1 : 0;
    bar(colours.tones[faint][its.colour], y, high, x(action.submitted), granted, granted, x(action.until));
  }
}

function marks(context, rows, plan, frame, x, colours, matches) {
  const size = Math.min(5, Math.max(2.5, plan.laneHeight / 2 - 1));
  context.beginPath();
  for (let k = 0; k < plan.count; k += 1) {
    const row = plan.picked[k];
    if (rows.status[row] < MARKED_FROM || (matches !== null && !matches[row])) continue;
    const y = topOf(plan, frame, plan.groupOfRun[rows.run[row]], plan.lanes[k]) + plan.laneHeight / 2 - 0.5;
    if (y > AXIS && y < frame.height) trace(context, STATUSES[rows.status[row]], x(rows.ended[row]), y, size);
  }
  finish(context, colours);
}

/** One mark, for the legend. */
export function mark(context, status, x, y, size) {
  context.beginPath();
  trace(context, status, x, y, size);
  finish(context, canvasColours());
}

function finish(context, colours) {
  context.fillStyle = colours.bad;
  context.strokeStyle = colours.card;
  context.lineWidth = 1;
  context.fill();
  context.stroke();
}

/** A shape for each failure status: no two differ by colour alone. */
function trace(context, status, x, y, size) {
  if (status === "timed_out") {
    context.moveTo(x, y - size);
    context.lineTo(x + size, y + size);
    context.lineTo(x - size, y + size);
    context.closePath();
  } else if (status === "cancelled") {
    context.rect(x - size * 0.8, y - size * 0.8, size * 1.6, size * 1.6);
  } else if (status === "refused") {
    context.moveTo(x + size * 0.9, y);
    context.arc(x, y, size * 0.9, 0, 7);
  } else {
    context.moveTo(x, y - size * 1.2);
    context.lineTo(x + size * 1.2, y);
    context.lineTo(x, y + size * 1.2);
    context.lineTo(x - size * 1.2, y);
    context.closePath();
  }
}

function grid(context, frame, x, colours) {
  const {step, values} = ticks(frame.range.from + frame.offset, frame.range.to + frame.offset,
    (frame.width - frame.left) / 130);
  context.font = `12px ${frame.font}`;
  context.textBaseline = "middle";
  context.textAlign = "left";
  const digits = step < 0.01 ? 3 : step < 0.1 ? 2 : step < 1 ? 1 : 0;
  for (const at of values) {
    const left = Math.round(x(at - frame.offset)) + 0.5;
    if (left < frame.left) continue;
    context.fillStyle = colours.rule;
    context.fillRect(left - 0.5, AXIS - 6, 1, frame.height - AXIS + 6);
    const label = step >= 60 ? timeOfDay(at).slice(0, 5) : timeOfDay(at, digits);
    if (left + context.measureText(label).width + 8 > frame.width) continue;
    context.fillStyle = colours.soft;
    context.fillText(label, left + 4, AXIS / 2 - 1);
  }
  context.fillStyle = colours.rule;
  context.fillRect(0, AXIS - 1, frame.width, 1);
}

function present(context, frame, x, colours) {
  const left = Math.round(x(frame.range.now));
  if (left < frame.left || left > frame.width) return;
  context.fillStyle = colours.accent;
  context.fillRect(left, AXIS, 1, frame.height);
}

function outline(context, rows, plan, frame, x, colours, selected) {
  if (!selected) return;
  for (let k = 0; k < plan.count; k += 1) {
    const row = plan.picked[k];
    if (rows.id(row) !== selected) continue;
    frameOf(context, plan, frame, colours, plan.groupOfRun[rows.run[row]], plan.lanes[k],
      x(rows.submitted[row]), x(rows.ended[row]));
  }
  for (const action of plan.live) {
    if (action.id !== selected) continue;
    const its = plan.groups.find((one) => one.run === action.run);
    frameOf(context, plan, frame, colours, its, action.lane, x(action.submitted), x(action.until));
  }
}

function frameOf(context, plan, frame, colours, its, lane, from, to) {
  const y = topOf(plan, frame, its, lane);
  context.strokeStyle = colours.selected;
  context.lineWidth = 2;
  context.strokeRect(from - 2, y - 2, Math.max(2, to - from) + 4, plan.laneHeight + 2);
}

/** At the right, if the lanes do not fit. */
function scrollbar(context, plan, frame, colours) {
  const room = frame.height - AXIS;
  if (plan.height <= room) return;
  const high = Math.max(24, (room * room) / plan.height);
  const y = AXIS + (frame.scroll / (plan.height - room)) * (room - high);
  context.fillStyle = colours.soft;
  context.fillRect(frame.width - 5, y, 4, high);
}

/** Names of trajectories, if lanes are high enough for text. */
function names(context, plan, frame, colours) {
  if (!frame.left || plan.laneHeight < 10) return;
  context.font = `11px ${frame.font}`;
  context.textAlign = "left";
  context.fillStyle = colours.soft;
  context.save();
  context.beginPath();
  context.rect(0, AXIS, frame.left - 8, frame.height - AXIS);
  context.clip();
  for (const its of plan.groups) {
    its.names.forEach((name, lane) => {
      const y = topOf(plan, frame, its, lane) + plan.laneHeight / 2;
      if (y > AXIS && y < frame.height) context.fillText(plain(name), 10, y);
    });
  }
  context.restore();
}

/** Removes control characters and marks that change the text direction; cuts what would not be visible. */
function plain(name) {
  return name.slice(0, 40).replace(/[\u0000-\u001f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "");
}
