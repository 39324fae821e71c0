// Pixels: filled rectangles, thousands per frame. Owns a buffer of plain pixels that is put on the canvas in one go;
// one canvas call per rectangle takes tens of milliseconds.

export class Pixels {
  constructor() {
    this.layer = document.createElement("canvas");
    this.context = this.layer.getContext("2d");
    this.image = null;
  }

  begin(width, height, ratio) {
    const [columns, lines] = [Math.round(width * ratio), Math.round(height * ratio)];
    this.ratio = ratio;
    if (!this.image || this.image.width !== columns || this.image.height !== lines) {
      this.layer.width = columns;
      this.layer.height = lines;
      this.image = this.context.createImageData(columns, lines);
      this.words = new Uint32Array(this.image.data.buffer);
    } else {
      this.words.fill(0);
    }
    this.columns = columns;
    this.lines = lines;
  }

  /** From left to right, `high` from the top; a colour is a word as `word` makes it. */
  fill(left, top, right, high, colour) {
    const {ratio, columns, words} = this;
    const from = Math.max(0, Math.round(left * ratio));
    const to = Math.min(columns, Math.round(right * ratio));
    if (to <= from) return;
    const first = Math.max(0, Math.round(top * ratio));
    const last = Math.min(this.lines, Math.round((top + high) * ratio));
    for (let line = first; line < last; line += 1) {
      const end = line * columns + to;
      for (let at = line * columns + from; at < end; at += 1) words[at] = colour;
    }
  }

  /** Over the present content of the canvas. */
  show(context) {
    this.context.putImageData(this.image, 0, 0);
    context.drawImage(this.layer, 0, 0, this.columns / this.ratio, this.lines / this.ratio);
  }
}

/** A colour such as #2a5ea8 as a little-endian pixel. */
export function word(colour, alpha = 255) {
  const value = parseInt(colour.slice(1), 16);
  return ((alpha << 24) | ((value & 0xff) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
