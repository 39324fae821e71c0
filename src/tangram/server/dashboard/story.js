// Story: the panel at the side with what happened to one action, line by line. Owns the panel. While the action is
// in progress it is fetched again with every view; once it has settled, nothing changes any more.

import {attr, box, button, el, keyed, put, putName, show, style} from "./dom.js";
import {duration, moment, timeOfDay, words} from "./format.js";
import {putRun} from "./palette.js";
import {STATUSES} from "./rows.js";
import {putSentence} from "./sentence.js";

export class StoryPanel {
  constructor(poll, rows, close) {
    this.poll = poll;
    this.rows = rows;
    this.id = "";
    this.story = null;
    this.asking = 0;
    this.root = document.getElementById("story");
    this.build(close);
  }

  build(close) {
    this.title = el("h2", "name");
    this.close = button("icon-button", "", "Close the story");
    this.close.append(el("span", "", "✕"));
    this.close.addEventListener("click", close);
    this.status = el("span", "status");
    this.run = button("run", "");
    this.name = el("span", "name note");
    this.explanation = el("p", "explanation");
    this.bar = el("div", "time-bar");
    this.parts = el("div", "time-parts");
    this.lines = el("ol", "story-lines");
    this.message = el("p", "empty");
    this.root.replaceChildren(
      box("div", "story-head", this.title, this.close),
      box("div", "story-facts", this.status, this.run, this.name),
      this.explanation, this.bar, this.parts, this.lines, this.message);
  }

  /** Called with every view and every change of place. */
  update({view, place}, fresh) {
    show(this.root, place.action !== "");
    if (place.action === "") {
      this.id = "";
      attr(this.root, "data-of", null);
      attr(this.root, "data-lines", null);
      return;
    }
    if (place.action !== this.id) {
      this.id = place.action;
      this.story = null;
      this.fill(view, "Asking…");
      this.fetch(view);
    } else if (fresh && !(this.story && STATUSES.includes(this.story.status))) {
      this.fetch(view);
    }
  }

  async fetch(view) {
    const number = ++this.asking;
    const {id} = this;
    try {
      const story = await this.poll.story(id);
      if (number !== this.asking || id !== this.id) return;
      this.story = story;
      this.fill(view, "");
    } catch (error) {
      if (number !== this.asking || id !== this.id) return;
      if (!this.story) this.fill(view, error.status === 404
        ? "The service does not remember this action." : "The story could not be fetched; the page tries again.");
    }
  }

  fill(view, message) {
    const {story} = this;
    const offset = view ? view.at - view.now_s : 0;
    putName(this.title, this.id);
    attr(this.root, "data-of", this.id);
    attr(this.root, "data-lines", story ? story.lines.length : null);
    put(this.message, message);
    show(this.message, message !== "");
    for (const node of [this.status, this.run, this.name, this.explanation, this.lines]) show(node, story !== null);
    this.fillTime();
    if (!story) return;
    put(this.status, words(story.status));
    attr(this.status, "data-status", story.status);
    putRun(this.run, story.run);
    putName(this.name, story.name);
    putSentence(this.explanation, story.explanation);
    show(this.explanation, story.explanation !== "");
    const first = story.lines[0]?.at_s ?? 0;
    const items = story.lines.map((line, k) => ({...line, k}));
    keyed(this.lines, items, (line) => `${line.k} ${line.at_s} ${line.text}`,
      () => box("li", "", box("time", "", el("b"), el("small")), el("span")),
      (node, line) => {
        put(node.firstChild.children[0], `+${duration(line.at_s - first)}`);
        put(node.firstChild.children[1], timeOfDay(line.at_s + offset, 3));
        attr(node.firstChild, "title", moment(line.at_s + offset));
        putSentence(node.lastChild, line.text);
      });
  }

  /** Of an action that has settled and is remembered: a bar of its parts. */
  fillTime() {
    const at = this.rows.find(this.id);
    show(this.bar, at >= 0);
    show(this.parts, at >= 0);
    if (at < 0) return;
    const row = this.rows.record(at);
    const total = Math.max(1e-9, row.ended_s - row.submitted_s);
    const parts = ["waiting", "overhead", "execution"].map((key) => ({key, seconds: row[`${key}_s`]}));
    keyed(this.bar, parts, (part) => part.key, () => el("div"), (piece, part) => {
      attr(piece, "class", `time-piece part-${part.key}`);
      style(piece, "flex-grow", String(part.seconds / total));
    });
    const make = () => box("span", "", el("i"), el("span"), el("b"));
    keyed(this.parts, parts, (part) => part.key, make, (piece, part) => {
      attr(piece.children[0], "class", `swatch part-${part.key}`);
      put(piece.children[1], part.key);
      put(piece.children[2], duration(part.seconds));
    });
  }

  focus() {
    this.close.focus();
  }
}
