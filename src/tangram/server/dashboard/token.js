// Token: prompts for a token when the service requires one. It is kept until the tab is closed, by poll.js.

import {box, button, el, put, show} from "./dom.js";

export class TokenDialog {
  constructor(use) {
    this.root = document.getElementById("token");
    const title = el("h2", "", "This service needs a token");
    title.id = "token-title";
    this.message = el("p", "bad");
    this.input = el("input");
    this.input.type = "password";
    this.input.id = "token-input";
    this.input.autocomplete = "off";
    this.input.required = true;
    const label = el("label", "", "Token");
    label.htmlFor = this.input.id;
    const send = button("primary", "Look");
    send.type = "submit";
    const form = box("form", "", title,
      el("p", "note",
        "An admin token shows every run, the token of a run its own. It stays in this tab until you close it."),
      label, this.input, this.message, send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const token = this.input.value.trim();
      if (!token) return;
      this.input.value = "";
      this.root.close();
      use(token);
    });
    // Without one there is nothing to show.
    this.root.addEventListener("cancel", (event) => event.preventDefault());
    this.root.append(form);
  }

  update({phase, message}) {
    if (phase !== "token") {
      if (this.root.open && phase === "live") this.root.close();
      return;
    }
    put(this.message, message ? `It was not accepted: ${message}` : "");
    show(this.message, message !== "");
    if (!this.root.open) this.root.showModal();
    this.input.focus();
  }
}
