// Timeline input: wheel, pointer and keys on the timeline. Owns the gestures; timeline.js owns their effects.
// Keys work wherever the focus is on its page, except in inputs.

import {actionAt} from "./timeline_point.js";

const CLICK = 4;
/* Pixels: a smaller movement is a click. */
const LINE = 16;
const KEY_PAN = 0.1;
const KEY_ZOOM = 1.4;

export function listen(timeline) {
  const {canvas} = timeline;
  canvas.addEventListener("wheel", (event) => wheel(timeline, event), {passive: false});
  document.addEventListener("keydown", (event) => timeline.root.isConnected && key(timeline, event));
  pointer(timeline, canvas);
}

function wheel(timeline, event) {
  if (!timeline.frame) return;
  event.preventDefault();
  const unit = event.deltaMode === 1 ? LINE : 1;
  if (event.shiftKey) {
    timeline.scrollBy((event.deltaY || event.deltaX) * unit);
  } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    timeline.pan((event.deltaX * unit) / timeline.width);
  } else {
    // A notch of a wheel is about 100 and zooms by a quarter; a pinch sets ctrl and has small steps.
    const speed = event.ctrlKey ? 0.01 : 0.0022;
    timeline.zoom(Math.exp(event.deltaY * unit * speed), timeline.second(event.offsetX));
  }
}

function pointer(timeline, canvas) {
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !timeline.frame) return;
    canvas.setPointerCapture(event.pointerId);
    drag = {x: event.offsetX, y: event.offsetY, lastX: event.offsetX, lastY: event.offsetY, moved: false};
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) {
      timeline.hover(event.offsetX, event.offsetY, event);
      return;
    }
    if (!drag.moved && Math.hypot(event.offsetX - drag.x, event.offsetY - drag.y) < CLICK) return;
    if (!drag.moved) timeline.left();
    drag.moved = true;
    canvas.classList.add("dragging");
    timeline.pan((drag.lastX - event.offsetX) / (timeline.width - timeline.frame.left));
    timeline.scrollBy(drag.lastY - event.offsetY);
    drag.lastX = event.offsetX;
    drag.lastY = event.offsetY;
  });
  const end = (event, clicked) => {
    if (!drag) return;
    const {moved} = drag;
    drag = null;
    canvas.classList.remove("dragging");
    if (clicked && !moved) {
      timeline.hover(event.offsetX, event.offsetY, event);
      timeline.openHovered();
    }
  };
  canvas.addEventListener("pointerup", (event) => end(event, true));
  canvas.addEventListener("pointercancel", (event) => end(event, false));
  canvas.addEventListener("pointerleave", () => !drag && timeline.left());
  canvas.addEventListener("dblclick", (event) => {
    if (!actionAt(timeline, event.offsetX, event.offsetY)) timeline.everything();
  });
}

const KEYS = {
  ArrowLeft: (timeline) => timeline.pan(-KEY_PAN),
  ArrowRight: (timeline) => timeline.pan(KEY_PAN),
  ArrowUp: (timeline) => timeline.scrollBy(-40),
  ArrowDown: (timeline) => timeline.scrollBy(40),
  "+": (timeline) => timeline.zoom(1 / KEY_ZOOM),
  "=": (timeline) => timeline.zoom(1 / KEY_ZOOM),
  "-": (timeline) => timeline.zoom(KEY_ZOOM),
  0: (timeline) => timeline.everything(),
  l: (timeline) => timeline.recent(),
  n: (timeline) => timeline.finder.walk(1),
  p: (timeline) => timeline.finder.walk(-1),
  Enter: (timeline) => timeline.openHovered(),
};

const OWN_KEYS = "input, textarea, select, dialog";

function key(timeline, event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.(OWN_KEYS)) return;
  if (event.key === "Enter" && event.target.closest?.("button, a")) return; // it activates that element
  const act = KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
  if (!act || !timeline.frame) return;
  event.preventDefault();
  act(timeline);
  // The marked action is on the canvas: Enter opens it and activates no button.
  if (timeline.hovered) timeline.canvas.focus({preventScroll: true});
}
