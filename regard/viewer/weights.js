"use strict";
// The weights of the pixel under the pointer, from the pixels by the formula of the filter:
// exp of minus a distance in space and of minus that of two patches, divided by their sum.

function unpacked(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

function mirrored(place, size) {
  const period = Math.max(1, 2 * (size - 1)), at = ((place % period) + period) % period;
  return at < size ? at : period - at;
}

// Mean squared difference of the patches around two pixels, values from 0 to 1.
function apart(photo, x, y, u, v) {
  const { wide, high, channels, pixels, patch, patch_weights: part } = photo;
  const reach = (patch - 1) / 2;
  let sum = 0;
  for (let down = -reach; down <= reach; down++) {
    const here = mirrored(y + down, high) * wide, there = mirrored(v + down, high) * wide;
    for (let right = -reach; right <= reach; right++) {
      const one = (here + mirrored(x + right, wide)) * channels;
      const two = (there + mirrored(u + right, wide)) * channels;
      let square = 0;
      for (let c = 0; c < channels; c++) square += (pixels[one + c] - pixels[two + c]) ** 2;
      sum += part[down + reach] * part[right + reach] * square;
    }
  }
  return sum / 255 ** 2;
}

function score(photo, x, y, u, v) {
  const { space, content, allowed, plain } = photo;
  let found = content === 0 ? 0 : Math.max(0, content * apart(photo, x, y, u, v) - allowed);
  if (plain > 0) found = Math.sqrt(found) / plain;
  return -space * ((x - u) ** 2 + (y - v) ** 2) - found;
}

// Where a pixel looks: the window around it within the photo, and its weights row by row.
function weightsAt(photo, x, y) {
  const reach = photo.radius ?? Math.max(photo.wide, photo.high);
  const left = Math.max(0, x - reach), right = Math.min(photo.wide - 1, x + reach);
  const top = Math.max(0, y - reach), bottom = Math.min(photo.high - 1, y + reach);
  const weights = [];
  for (let v = top; v <= bottom; v++)
    for (let u = left; u <= right; u++) weights.push(score(photo, x, y, u, v));
  const most = weights.reduce((a, b) => Math.max(a, b), -Infinity);
  let sum = 0;
  for (let i = 0; i < weights.length; i++) sum += weights[i] = Math.exp(weights[i] - most);
  return { left, top, wide: right - left + 1, weights: weights.map((w) => w / sum) };
}

function element(name, parent, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function canvasIn(parent, label) {
  const figure = element("figure", parent), canvas = element("canvas", figure);
  element("figcaption", figure, label);
  return canvas;
}

function paint(canvas, wide, high, colour) {
  canvas.width = wide;
  canvas.height = high;
  const context = canvas.getContext("2d"), image = context.createImageData(wide, high);
  for (let i = 0; i < wide * high; i++) image.data.set([...colour(i), 255], 4 * i);
  context.putImageData(image, 0, 0);
}

function start() {
  const told = JSON.parse(document.getElementById("data").textContent);
  const photo = { ...told.photo, pixels: unpacked(told.photo.pixels) };
  const { wide, high, channels, pixels } = photo;
  const page = document.getElementById("page");
  page.replaceChildren();
  page.className = "pixel-weights";
  element("h1", page, told.title);
  const status = element("p", page);
  status.setAttribute("role", "status");
  const pictures = element("div", page), shown = canvasIn(pictures, told.captions[0]);
  const map = canvasIn(pictures, told.captions[1]);
  const grey = (i, c) => pixels[i * channels + (channels === 3 ? c : 0)];
  const at = { x: wide >> 1, y: high >> 1 };
  shown.tabIndex = 0;
  shown.setAttribute("aria-label", told.captions[0]);

  function draw() {
    const found = weightsAt(photo, at.x, at.y), rows = found.weights.length / found.wide;
    const top = found.weights.reduce((a, b) => Math.max(a, b), 0);
    const own = found.weights[(at.y - found.top) * found.wide + at.x - found.left];
    const inside = (i) => {
      const u = (i % wide) - found.left, v = Math.floor(i / wide) - found.top;
      return u >= 0 && v >= 0 && u < found.wide && v < rows ? found.weights[v * found.wide + u] / top : 0;
    };
    paint(shown, wide, high, (i) => {
      if (i === at.y * wide + at.x) return [230, 60, 60];
      const share = 0.75 * inside(i);
      return [47, 91, 216].map((ink, c) => share * ink + (1 - share) * grey(i, c));
    });
    paint(map, found.wide, rows, (i) => {
      const share = found.weights[i] / top;
      return [16, 31, 87].map((ink) => 255 + share * (ink - 255));
    });
    status.textContent = `pixel ${at.x},${at.y}: its own weight ${own.toPrecision(3)}, ` +
      `the largest ${top.toPrecision(3)}, of ${found.weights.length} pixels`;
  }

  function move(event) {
    const box = shown.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * wide);
    const y = Math.floor(((event.clientY - box.top) / box.height) * high);
    at.x = Math.min(wide - 1, Math.max(0, x));
    at.y = Math.min(high - 1, Math.max(0, y));
    draw();
  }
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  shown.addEventListener("pointermove", move);
  shown.addEventListener("pointerdown", move);
  shown.addEventListener("keydown", (event) => {
    const step = steps[event.key];
    if (!step) return;
    event.preventDefault();
    at.x = Math.min(wide - 1, Math.max(0, at.x + step[0]));
    at.y = Math.min(high - 1, Math.max(0, at.y + step[1]));
    draw();
  });
  draw();
}

if (typeof document !== "undefined") start();
