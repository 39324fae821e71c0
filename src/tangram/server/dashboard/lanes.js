// Lanes: the layout of the timeline. Runs are groups, one below the other; in a group a lane is a row of
// actions that do not overlap (packed), or a trajectory. Only lanes with visible actions take up space.

import {ROWS_MAX} from "./rows.js";

export const HEAD = 20;
/* Above each group: the name of its run. */
const LANE_MIN = 4;
const NAMED_MIN = 14;
/* Of lanes with names beside them: readable. */
const LANE_MAX = 18;

const picked = new Int32Array(ROWS_MAX);
const lanes = new Int32Array(ROWS_MAX);

/**
 * Selects what overlaps the range of time and assigns lanes. `live` are the actions in progress.
 * The next call reuses the arrays of the result.
 */
export function layout(rows, live, {from, to, run, mode, height}) {
  const groups = new Map();
  const count = pick(rows, from, to, run);
  const shown = live.filter((action) => action.submitted <= to && action.until >= from && (!run || action.run === run));
  for (let k = 0; k < count; k += 1) group(groups, rows.runs.list[rows.run[picked[k]]]).count += 1;
  for (const action of shown) group(groups, action.run).count += 1;
  if (mode === "trajectories") byTrajectory(rows, count, shown, groups);
  else packed(rows, count, shown, groups);
  const stacked = stack(groups, height, mode === "trajectories" ? NAMED_MIN : LANE_MIN);
  const groupOfRun = rows.runs.list.map((name) => groups.get(name) ?? null);
  return {picked, lanes, count, live: shown, ...stacked, groupOfRun};
}

function pick(rows, from, to, run) {
  const wanted = run ? rows.runs.numbers.get(run) ?? -1 : -2;
  const [first, end] = rows.between(from, to);
  let count = 0;
  for (let k = first; k < end; k += 1) {
    if ((wanted === -2 || rows.run[k] === wanted) && rows.touches(k, from, to)) picked[count++] = k;
  }
  return count;
}

function group(groups, run) {
  let group = groups.get(run);
  if (!group) groups.set(run, (group = {run, lanes: 0, count: 0, names: []}));
  return group;
}

function packed(rows, count, shown, groups) {
  const most = new Int32Array(rows.runs.list.length);
  for (let k = 0; k < count; k += 1) {
    const lane = (lanes[k] = rows.lane[picked[k]]);
    const run = rows.run[picked[k]];
    if (lane >= most[run]) most[run] = lane + 1;
  }
  for (const [number, name] of rows.runs.list.entries()) {
    if (most[number]) groups.get(name).lanes = most[number];
  }
  const endsByRun = new Map();
  for (const action of shown) {
    if (!endsByRun.has(action.run)) {
      endsByRun.set(action.run, (rows.lanesByRun[rows.runs.numbers.get(action.run)] ?? []).slice());
    }
    const ends = endsByRun.get(action.run);
    let lane = 0;
    while (lane < ends.length && ends[lane] > action.submitted) lane += 1;
    ends[lane] = Infinity;
    action.lane = lane;
    const its = groups.get(action.run);
    its.lanes = Math.max(its.lanes, lane + 1);
  }
}

function byTrajectory(rows, count, shown, groups) {
  for (const action of shown) {
    action.number = rows.trajectoryNumber(action.run, action.trajectory);
  }
  const laneOf = new Int32Array(rows.trajectories.list.length).fill(-1);
  const present = new Set();
  for (let k = 0; k < count; k += 1) present.add(rows.trajectory[picked[k]]);
  for (const action of shown) present.add(action.number);
  for (const number of [...present].sort((a, b) => a - b)) {
    const [run, name] = rows.trajectoryParts[number];
    const its = groups.get(run);
    laneOf[number] = its.lanes++;
    its.names.push(name);
  }
  for (let k = 0; k < count; k += 1) lanes[k] = laneOf[rows.trajectory[picked[k]]];
  for (const action of shown) action.lane = laneOf[action.number];
}

/** Groups by name, one below the other, with lanes that fill the height. */
function stack(groups, height, least) {
  const ordered = [...groups.values()].sort((a, b) => (a.run < b.run ? -1 : 1));
  const total = ordered.reduce((sum, its) => sum + its.lanes, 0);
  const room = height - ordered.length * HEAD;
  const laneHeight = Math.min(LANE_MAX, Math.max(least, Math.floor(room / Math.max(1, total))));
  let top = 0;
  for (const its of ordered) {
    its.top = top;
    top += HEAD + its.lanes * laneHeight;
  }
  return {groups: ordered, laneHeight, height: top, laneTotal: total};
}
