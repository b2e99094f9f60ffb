// Canvases: the map of blocks, its legend, and the history of tokens per second.

export const FREE = -1, CACHED = -2, SHARED = -3, LEAVING = -4;
// Okabe and Ito's colors, which people with any kind of color vision can tell apart; rows also have their numbers.
const COLORS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1"];
const INKS = ["#fff", "#000", "#fff", "#000", "#000", "#fff", "#000", "#fff"]; // text on them
const TALL = 320; // pixels: the map is no higher, except with cells of the smallest size
const SMALLEST = 5, LARGEST = 26; // pixels a cell

export const color = (row) => COLORS[row % COLORS.length];
export const ink = (row) => INKS[row % INKS.length];

function theme() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue("--" + name).trim();
}

// A context for drawing in CSS pixels, cleared, sharp on any screen.
function prepared(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}

// part: the share of the cell's blocks that are used, from 0 to 1
function drawCell(context, paint, what, x, y, size, part) {
  const inner = size - (size > 8 ? 2 : 1);
  context.lineWidth = 1;
  if (what === FREE) {
    context.strokeStyle = paint("free");
    context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
  } else if (what === CACHED || what === LEAVING) {
    context.strokeStyle = paint("cached");
    context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    context.beginPath();
    if (what === CACHED) {
      for (const shift of inner > 10 ? [0.33, 0.67, 1, 1.33, 1.67] : [0.6, 1, 1.4]) {
        const low = Math.max(0, shift - 1) * inner, high = Math.min(1, shift) * inner;
        context.moveTo(x + low, y + high);
        context.lineTo(x + high, y + low);
      }
    } else {
      context.moveTo(x + 2, y + 2);
      context.lineTo(x + inner - 2, y + inner - 2);
      context.moveTo(x + inner - 2, y + 2);
      context.lineTo(x + 2, y + inner - 2);
    }
    context.stroke();
  } else {
    context.strokeStyle = context.fillStyle = what === SHARED ? paint("shared") : color(what);
    const height = Math.max(2, part * inner);
    if (part < 1) context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
    context.fillRect(x, y + inner - height, inner, height);
    if (inner > 13 && part === 1) {
      context.fillStyle = what === SHARED ? paint("on-shared") : ink(what);
      context.font = `600 ${Math.min(12, inner * (what > 99 ? 0.42 : 0.6))}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(what === SHARED ? "+" : String(what), x + inner / 2, y + inner / 2 + 0.5);
    }
  }
}

// The map of blocks. lit: the row whose blocks stand out, or null. Returns the size and columns for `cellAt`.
export function drawMap(canvas, blocks, lit) {
  const paint = theme(), width = canvas.clientWidth, count = blocks.cells.length;
  let size = Math.floor(Math.sqrt((width * TALL) / count));
  size = Math.max(SMALLEST, Math.min(LARGEST, size));
  const columns = Math.max(1, Math.floor(width / size)), height = Math.ceil(count / columns) * size;
  canvas.style.height = height + "px";
  const context = prepared(canvas, width, height);
  blocks.cells.forEach((what, index) => {
    context.globalAlpha = lit === null || what === lit ? 1 : 0.25;
    const part = blocks.filled ? blocks.filled[index] / blocks.per_cell : 1;
    drawCell(context, paint, what, (index % columns) * size, Math.floor(index / columns) * size, size, part);
  });
  return { size, columns };
}

export function cellAt(event, layout, count) {
  const column = Math.floor(event.offsetX / layout.size), line = Math.floor(event.offsetY / layout.size);
  const index = line * layout.columns + column;
  return column < layout.columns && index >= 0 && index < count ? index : null;
}

export function drawSample(canvas, what) {
  drawCell(prepared(canvas, 14, 14), theme(), what, 0, 0, 16, 1);
}

// points: [seconds, tokens/s], oldest first; the last `span` seconds are shown
export function drawHistory(canvas, points, span) {
  const paint = theme(), width = canvas.clientWidth, height = canvas.clientHeight;
  const context = prepared(canvas, width, height);
  const top = Math.max(1, ...points.map(([, rate]) => rate));
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = paint("soft");
  context.textAlign = "right";
  context.fillText(top > 1 ? Math.round(top).toLocaleString("en") : "", width - 2, 10);
  context.textAlign = "left";
  context.fillText(`${Math.round(span)} s`, 0, height - 5);
  const floor = height - 1.5, end = points.length ? points[points.length - 1][0] : 0;
  const place = ([at, rate]) => [width * (1 - (end - at) / span), floor - (rate / top) * (height - 18)];
  context.strokeStyle = paint("line");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, floor);
  context.lineTo(width, floor);
  context.stroke();
  if (points.length < 2) return;
  context.strokeStyle = context.fillStyle = paint("accent");
  context.lineWidth = 2;
  context.lineJoin = "round";
  context.beginPath();
  points.map(place).forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
  context.lineTo(width, floor);
  context.lineTo(place(points[0])[0], floor);
  context.globalAlpha = 0.15;
  context.fill();
}
