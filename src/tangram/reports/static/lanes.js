// Lanes: many rows of bars over time on a canvas, to zoom and move; see reports/timeline_lanes.py for the data.

(() => {
  const data = kit.data("lanes-data");
  const box = document.getElementById("lanes"), scroller = document.getElementById("scroller");
  const tall = document.getElementById("tall"), canvas = box.querySelector("canvas");
  const shown = document.getElementById("lanes-range"), context = canvas.getContext("2d");
  const AXIS = 22, STRIP = 15, HEAD = AXIS + data.strips.length * STRIP + 8;
  const ROW = data.lanes.length > 400 ? 8 : data.lanes.length > 60 ? 11 : 16;
  const whole = data.total || 1;
  let from = 0, to = whole, width = 0, height = 0, left = 0, colours = {};

  const x = (s) => left + (s - from) / (to - from) * (width - left);
  const at = (px) => from + (px - left) / (width - left) * (to - from);

  function measure() {
    colours = kit.colours(["ink", "soft", "grid", "card", "bad", ...new Set(data.kinds.map((kind) => kind.colour)),
      ...data.strips.map((strip) => strip.colour)]);
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
    let cut = text;
    while (most && cut.length > 3 && context.measureText(cut).width > most)
      cut = "\u2026" + cut.slice(Math.max(2, Math.ceil(cut.length / 12) + 1));
    context.fillText(cut, px, y);
  }

  function ticks() {
    const ticks = kit.ticks(from, to, Math.max(2, (width - left) / 110));
    return ticks.values.map((tick) => [tick, tick.toFixed(ticks.decimals) + " s"]);
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
    data.strips.forEach((strip, row) => {
      const y = AXIS + row * STRIP;
      words(strip.name, 0, y + 11, "ink", left - 8);
      fill(strip.colour, false, 0, whole, y, STRIP - 3);
      for (const [a, b] of strip.gaps) {
        if (b < from || a > to) continue;
        const start = Math.max(left, x(a)), end = Math.min(width, x(b));
        context.fillStyle = colours.card;
        context.fillRect(start, y, Math.max(end - start, 0.6), STRIP - 3);
      }
      for (const [a, b, number] of strip.causes)
        if (b >= from && a <= to) fill(data.kinds[number].colour, true, a, b, y + 3, STRIP - 9);
    });
  }

  function lanes() {
    const first = Math.floor(scroller.scrollTop / ROW);
    for (let row = first; row < data.lanes.length; row += 1) {
      const y = HEAD + row * ROW - scroller.scrollTop;
      if (y > height) break;
      const lane = data.lanes[row];
      if (ROW > 8) words(lane.name, 0, y + ROW - 4, lane.failed ? "bad" : "soft", left - 8);
      for (const [a, b, number] of lane.bars) {
        const kind = data.kinds[number];
        fill(kind.colour, kind.pale, a, b, y, ROW - 2);
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
    shown.textContent = `${from.toFixed(2)} s to ${to.toFixed(2)} s of ${whole.toFixed(2)} s`;
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
      return py > HEAD && lane ? `${lane.name}\n${lane.details}` : "";
    }
    if (py < HEAD) {
      const strip = data.strips[Math.floor((py - AXIS) / STRIP)];
      if (py < AXIS || !strip) return "";
      const gap = strip.gaps.find(([a, b]) => a <= s && s < b);
      if (!gap) return `${strip.name}: busy at ${s.toFixed(3)} s`;
      const causes = gap[2].map(([number, share]) => `${(100 * share).toFixed(0)} % ${data.kinds[number].label}`);
      return `${strip.name}: idle for ${(gap[1] - gap[0]).toFixed(3)} s\n${causes.join("\n")}`;
    }
    const lane = data.lanes[Math.floor((py - HEAD + scroller.scrollTop) / ROW)];
    const bar = lane && lane.bars.find(([a, b]) => a <= s && s < b);
    if (!bar) return "";
    const doing = `${data.kinds[bar[2]].label}, ${(bar[1] - bar[0]).toFixed(3)} s`;
    return `${lane.name}\n${doing}${bar[3] ? "\n" + bar[3] : ""}\n${lane.details}`;
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
