// Timeline point: the action at a point of the timeline, and its tooltip. Changes nothing.

import {cut} from "./dom.js";
import {duration, units, words} from "./format.js";
import {AXIS, scale, topOf} from "./timeline_paint.js";
import {showTooltip} from "./tooltip.js";

const NEAR = 4;
/* Pixels: the tolerance for thin bars. */
const NAME_MAX = 60;

/** The action at a point of the canvas: a record of a row, one in progress, or null. */
export function actionAt({plan, frame, rows}, x, y) {
  if (!plan || x < frame.left || y < AXIS) return null;
  const its = plan.groups.find((one) => {
    const top = topOf(plan, frame, one, 0);
    return y >= top && y < top + one.lanes * plan.laneHeight;
  });
  if (!its) return null;
  const lane = Math.floor((y - topOf(plan, frame, its, 0)) / plan.laneHeight);
  const pixel = scale(frame);
  let best = null;
  let nearest = NEAR;
  const consider = (from, to, candidate) => {
    const away = Math.max(0, pixel(from) - x, x - pixel(to));
    if (away < nearest) [nearest, best] = [away, candidate];
  };
  for (const action of plan.live) {
    if (action.run === its.run && action.lane === lane) consider(action.submitted, action.until, action);
  }
  for (let k = 0; k < plan.count && nearest > 0; k += 1) {
    const row = plan.picked[k];
    if (plan.lanes[k] !== lane || plan.groupOfRun[rows.run[row]] !== its) continue;
    consider(rows.submitted[row], rows.ended[row], row);
  }
  return typeof best === "number" ? rows.record(best) : best;
}

export function showActionTooltip(x, y, action) {
  const name = (text) => cut(text, NAME_MAX);
  const lines = [["class", name(action.name)], ["run", name(action.run)], ["trajectory", name(action.trajectory)]];
  lines.push(...(action.until === undefined ? linesOfRow(action) : linesOfLive(action)));
  if (action.node) lines.push(["node", name(action.node)]);
  showTooltip(x, y, name(action.id), lines);
}

function linesOfRow(row) {
  const lines = [
    ["ended", words(row.status)], ["completion time", duration(row.ended_s - row.submitted_s)],
    ["waiting", duration(row.waiting_s)], ["overhead", duration(row.overhead_s)],
    ["execution", duration(row.execution_s)],
  ];
  if (row.cpu) lines.push(["reserved", units(row.cpu, "milli-cores")]);
  return lines;
}

function linesOfLive(action) {
  const lines = [["state", action.state], ["waiting", duration((action.granted ?? action.until) - action.submitted)]];
  if (action.granted !== null) lines.push(["since granted", duration(action.until - action.granted)]);
  return lines;
}
