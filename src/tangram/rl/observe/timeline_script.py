"""The script and style of the timeline page: draws lanes on a canvas, zooms, moves, and tells what one points at.

Owns what happens in the browser. All text comes out of the data and goes to a canvas or to the page's tooltip, which
shows text as text. Loads nothing.
"""

from __future__ import annotations

STYLE = """
#lanes { padding: 10px 12px; outline-offset: 2px; }
#lanes .tools { display: flex; gap: 6px; align-items: center; margin-bottom: 8px; font-size: 13px; color: var(--soft); }
#lanes button {
  font: inherit; min-width: 30px; padding: 2px 9px; color: var(--ink); background: var(--band); cursor: pointer;
  border: 1px solid var(--rule); border-radius: 6px;
}
#scroller { overflow-y: auto; max-height: 560px; }
#tall { position: relative; }
#lanes canvas { position: sticky; top: 0; display: block; width: 100%; cursor: grab; touch-action: pan-y; }
.told td, .told th { text-align: left; white-space: normal; padding-left: 14px; }
.told td:first-child { white-space: nowrap; }
.bar { display: flex; width: 180px; height: 14px; border-radius: 3px; overflow: hidden; margin-top: 4px; }
.bar i { background: var(--colour); } .bar i.pale { opacity: .4; }
"""

SCRIPT = """
(() => {
  const data = JSON.parse(document.getElementById("lanes-data").textContent);
  const box = document.getElementById("lanes"), scroller = document.getElementById("scroller");
  const tall = document.getElementById("tall"), canvas = box.querySelector("canvas");
  const seen = document.getElementById("seen"), context = canvas.getContext("2d");
  const AXIS = 22, STRIP = 15, HEAD = AXIS + data.stages.length * STRIP + 8;
  const ROW = data.lanes.length > 400 ? 8 : data.lanes.length > 60 ? 11 : 16;
  const whole = data.total || 1;
  let from = 0, to = whole, width = 0, height = 0, left = 0, colours = {};

  const x = (s) => left + (s - from) / (to - from) * (width - left);
  const at = (px) => from + (px - left) / (width - left) * (to - from);

  function measure() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ink", "soft", "grid", "card", "bad", "p0", "k0", "k1", "k2", "k3", "k4", "k6"])
      colours[name] = style.getPropertyValue("--" + name).trim();
    const all = HEAD + data.lanes.length * ROW + 4;
    tall.style.height = all + "px";
    height = Math.min(all, 560);
    width = scroller.clientWidth;
    left = Math.min(200, Math.round(width * 0.24));
    const ratio = devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = height + "px";
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    paint();
  }

  function fill(colour, pale, a, b, y, high) {
    const start = Math.max(left, x(a)), end = Math.min(width, x(b));
    if (end < left || start > width) return;
    context.globalAlpha = pale ? 0.36 : 1;
    context.fillStyle = colours[colour];
    context.fillRect(start, y, Math.max(end - start, 0.6), high);
    context.globalAlpha = 1;
  }

  function words(text, px, y, colour, most) {
    context.fillStyle = colours[colour];
    let shown = text;
    while (most && shown.length > 3 && context.measureText(shown).width > most)
      shown = "\\u2026" + shown.slice(Math.max(2, Math.ceil(shown.length / 12) + 1));
    context.fillText(shown, px, y);
  }

  function step() {
    const rough = (to - from) / Math.max(2, (width - left) / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map((digit) => digit * power).find((each) => each >= rough) || rough;
  }

  function ticks() {
    const every = step(), digits = Math.max(0, -Math.floor(Math.log10(every) + 1e-9)), found = [];
    for (let k = Math.ceil(from / every); k * every <= to + every / 1e6; k += 1)
      found.push([k * every, (k * every).toFixed(digits) + " s"]);
    return found;
  }

  function grid(bottom) {
    context.fillStyle = colours.grid;
    for (const [tick] of ticks()) context.fillRect(x(tick), AXIS - 4, 1, bottom - AXIS + 4);
  }

  function axis() {
    context.textAlign = "center";
    for (const [tick, text] of ticks()) words(text, Math.min(Math.max(x(tick), left + 14), width - 22), 11, "soft", 0);
    context.textAlign = "left";
  }

  function strips() {
    data.stages.forEach((stage, row) => {
      const y = AXIS + row * STRIP;
      words(stage.name, 0, y + 11, "ink", left - 8);
      fill(stage.colour, false, 0, whole, y, STRIP - 3);
      for (const [a, b] of stage.gaps) {
        if (b < from || a > to) continue;
        const start = Math.max(left, x(a)), end = Math.min(width, x(b));
        context.fillStyle = colours.card;
        context.fillRect(start, y, Math.max(end - start, 0.6), STRIP - 3);
      }
      for (const [a, b, number] of stage.mains)
        if (b >= from && a <= to) fill(data.activities[number].colour, true, a, b, y + 3, STRIP - 9);
    });
  }

  function lanes() {
    const first = Math.floor(scroller.scrollTop / ROW);
    for (let row = first; row < data.lanes.length; row += 1) {
      const y = HEAD + row * ROW - scroller.scrollTop;
      if (y > height) break;
      const lane = data.lanes[row];
      if (ROW > 8) words(lane.id, 0, y + ROW - 4, lane.bad ? "bad" : "soft", left - 8);
      for (const [a, b, number] of lane.pieces) {
        const activity = data.activities[number];
        fill(activity.colour, activity.pale, a, b, y, ROW - 2);
      }
    }
  }

  function paint() {
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    grid(height);
    lanes();
    context.fillStyle = colours.card;
    context.fillRect(0, 0, width, HEAD - 3);
    grid(HEAD - 3);
    axis();
    strips();
    seen.textContent = `${from.toFixed(2)} s to ${to.toFixed(2)} s of ${whole.toFixed(2)} s`;
  }

  function show(a, b) {
    const length = Math.min(whole, Math.max(whole / 1e5, b - a));
    from = Math.min(Math.max(0, a), whole - length);
    to = from + length;
    paint();
  }

  function zoom(times, around) {
    if (times === 0) return show(0, whole);
    show(around - (around - from) / times, around + (to - around) / times);
  }

  function tip(px, py) {
    const s = at(px);
    if (px < left) {
      const lane = data.lanes[Math.floor((py - HEAD + scroller.scrollTop) / ROW)];
      return py > HEAD && lane ? `${lane.id}\\n${lane.says}` : "";
    }
    if (py < HEAD) {
      const stage = data.stages[Math.floor((py - AXIS) / STRIP)];
      if (py < AXIS || !stage) return "";
      const gap = stage.gaps.find(([a, b]) => a <= s && s < b);
      if (!gap) return `${stage.name}: busy at ${s.toFixed(3)} s`;
      const causes = gap[2].map(([number, share]) => `${(100 * share).toFixed(0)} % ${data.activities[number].words}`);
      return `${stage.name}: idle for ${(gap[1] - gap[0]).toFixed(3)} s\\n${causes.join("\\n")}`;
    }
    const lane = data.lanes[Math.floor((py - HEAD + scroller.scrollTop) / ROW)];
    const piece = lane && lane.pieces.find(([a, b]) => a <= s && s < b);
    if (!piece) return "";
    const said = `${data.activities[piece[2]].words}, ${(piece[1] - piece[0]).toFixed(3)} s`;
    return `${lane.id}\\n${said}${piece[3] ? "\\n" + piece[3] : ""}\\n${lane.says}`;
  }

  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = {px: event.offsetX, from, to};
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      const moved = (event.offsetX - dragged.px) / (width - left) * (dragged.to - dragged.from);
      show(dragged.from - moved, dragged.to - moved);
    }
  });
  canvas.addEventListener("mousemove", (event) => {
    const text = tip(event.offsetX, event.offsetY);
    if (text) canvas.dataset.tip = text; else delete canvas.dataset.tip;
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey && !event.metaKey) return;
    event.preventDefault();
    const turned = event.deltaY || event.deltaX;
    zoom(turned < 0 ? 1.25 : 0.8, at(Math.max(left, event.offsetX)));
  }, {passive: false});
  box.addEventListener("keydown", (event) => {
    const length = to - from, keys = {"+": 2, "=": 2, "-": 0.5, "0": 0};
    if (event.key in keys) zoom(keys[event.key], (from + to) / 2);
    else if (event.key === "ArrowLeft") show(from - length / 5, to - length / 5);
    else if (event.key === "ArrowRight") show(from + length / 5, to + length / 5);
    else return;
    event.preventDefault();
  });
  for (const button of box.querySelectorAll("button"))
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom), (from + to) / 2));
  scroller.addEventListener("scroll", paint);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", measure);
  addEventListener("resize", measure);
  measure();
})();
"""
