// Theme: light or dark. The system decides until it is switched; the choice is kept for this browser.

import {attr, button, put} from "./dom.js";
import {forgetColours} from "./palette.js";

const KEPT = "tangram.theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function kept() {
  try {
    return localStorage.getItem(KEPT);
  } catch {
    return null; // Storage may be forbidden; then the choice lasts until the page is closed.
  }
}

let chosen = kept();

function isDark() {
  return chosen ? chosen === "dark" : system.matches;
}

/** The switch. `changed` is called after every change of theme. */
export function themeSwitch(changed) {
  const node = button("icon-button", "");
  const mark = document.createElement("span");
  mark.setAttribute("aria-hidden", "true");
  node.append(mark);
  node.dataset.theme = "";
  const apply = () => {
    const dark = isDark();
    attr(document.documentElement, "data-theme", dark ? "dark" : "light");
    put(mark, dark ? "☀" : "☾");
    const label = dark ? "Switch to light" : "Switch to dark";
    attr(node, "aria-label", label);
    attr(node, "title", label);
    forgetColours();
    changed();
  };
  node.addEventListener("click", () => {
    chosen = isDark() ? "light" : "dark";
    try {
      localStorage.setItem(KEPT, chosen);
    } catch {
      // As above.
    }
    apply();
  });
  system.addEventListener("change", apply);
  apply();
  return node;
}
