// Sentence: text of the service with links on ids of actions. Owns how ids are detected: by the ids and
// runs of the latest view, word by word, so that only ids in the sentence become links.

import {button, cut, el, putName} from "./dom.js";

const WORD = /^([("']*)(.*?)([)"',;:.]*)$/s;
const STRANGE = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/;
/* Marks that change the text direction: a word with one is isolated. */
const written = new WeakMap();

let live = new Set();
let runs = [];

/** Called with every view. */
export function meetActions(view) {
  live = new Set([...view.waiting, ...view.running].map((action) => action.id));
  runs = view.runs.map((run) => `${run.name}/`);
}

function isAction(word) {
  return live.has(word) || runs.some((run) => word.length > run.length && word.startsWith(run));
}

export function putSentence(node, text) {
  if (written.get(node) === text) return;
  written.set(node, text);
  const parts = [];
  for (const piece of text.split(/(\s+)/)) {
    const [, before, word, after] = WORD.exec(piece);
    if (isAction(word)) {
      const link = named(button("link", ""), word);
      link.dataset.actionId = word;
      parts.push(before, link, after);
    } else {
      parts.push(STRANGE.test(piece) || piece !== cut(piece) ? named(el("span", "word"), piece) : piece);
    }
  }
  node.replaceChildren(...parts);
}

function named(node, word) {
  putName(node, word);
  return node;
}
