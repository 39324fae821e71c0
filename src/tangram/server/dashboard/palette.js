// Palette: the colours of runs. Owns the numbers of colours; the style sheet owns the colours, and the
// canvas reads them from there. A run keeps its colour for as long as the page is open.

import {attr, putName} from "./dom.js";
import {word} from "./pixels.js";

export const HIDDEN = "another run";
/* As in runtime/views.py: in place of names that are hidden from the caller. */

const COLOURS = 8;
const FAINT = 46;
/* Of 255: rows that the search does not match. */
const numberByRun = new Map();

/** Called with every view before anything is drawn, so that the same runs get the same colours after a reload. */
export function meetRuns(names) {
  for (const name of [...names].sort()) {
    if (name !== HIDDEN && !numberByRun.has(name)) numberByRun.set(name, numberByRun.size % COLOURS);
  }
}

/** A number, or "none" without a name. */
export function colourOf(run) {
  return numberByRun.get(run) ?? "none";
}

/** For the canvas: an index into its tones. */
export function colourNumber(run) {
  return numberByRun.get(run) ?? COLOURS;
}

export function paintRun(node, run) {
  attr(node, "data-colour", colourOf(run));
}

/** A button that filters by a run; plain text for runs without a name. */
export function putRun(node, run) {
  putName(node, run);
  paintRun(node, run);
  attr(node, "data-run", run === HIDDEN ? null : run);
  node.disabled = run === HIDDEN;
}

/** A button that opens the story of an action; plain text for actions without a name. */
export function putAction(node, id, run) {
  const nameless = run === HIDDEN || id === HIDDEN || id === "";
  putName(node, id);
  attr(node, "data-action-id", nameless ? null : id);
  node.disabled = nameless;
}

let colours = null;

/**
 * The colours of the style sheet for the canvas, read once per theme. `tones` are pixels: clear and faint ones, by run,
 * for waiting, overhead and execution.
 */
export function canvasColours() {
  if (colours) return colours;
  const computed = getComputedStyle(document.documentElement);
  const read = (name) => computed.getPropertyValue(name).trim();
  const names = [...Array(COLOURS).keys(), "none"].map((k) => `r${k}`);
  const tones = (alpha) => names.map(
    (name) => [`--${name}-light`, `--${name}-deep`, `--${name}`].map((one) => word(read(one), alpha)));
  colours = {
    tones: [tones(255), tones(FAINT)],
    ink: read("--ink"), soft: read("--soft"), rule: read("--rule"), card: read("--card"), band: read("--band"),
    bad: read("--bad"), accent: read("--accent"), selected: read("--selected"),
  };
  return colours;
}

export function forgetColours() {
  colours = null;
}
