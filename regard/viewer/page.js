"use strict";
// Everything is built with createElement and textContent: a token is shown, never parsed.
(async () => {
  // `steps` are those of a training: picture i is of probe i % probes, at step i / probes
  const { pictures, steps: moments = [] } = JSON.parse(document.getElementById("data").textContent);
  const probes = moments.length ? pictures.length / moments.length : pictures.length;
  const page = document.getElementById("page");
  const state = {
    picture: 0, view: 0, head: "mean", tab: "head", scale: "linear", style: "",
    zoom: 1,
    hover: null, // what the pointer or the focus is on: {side: "rows" | "columns", at}
    pin: null, // what was clicked, shown while nothing is hovered
    step: null,
    // the query over an image: "class", "mean", a token's number, or a place [x, y] from 0 to 1
    query: "class",
    over: null, // the place that the pointer is on
    word: null, // the word of a recording that is pointed at
  };
  const LINES = 48; // up to so many tokens are joined by lines at first, more are shaded
  const MOST_LINES = 150;

  // ---- small things -----------------------------------------------------------------------

  function make(tag, settings = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(settings)) {
      if (key === "class") element.className = value;
      else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (key === "text") element.textContent = value;
      else if (value === true) element.setAttribute(key, "");
      else if (value !== null && value !== undefined && value !== false) {
        element.setAttribute(key, value);
      }
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  // A word start is drawn faintly, so that the word is what one reads.
  function written(token, language = "") {
    const bdi = make("bdi", { lang: language || null, dir: "auto" });
    if (token.startsWith("▁") && token.length > 1) {
      bdi.append(make("span", { class: "mark", text: "▁" }), token.slice(1));
    } else bdi.textContent = token;
    return bdi;
  }

  const plain = (token) => (token.startsWith("▁") && token.length > 1 ? token.slice(1) : token);

  const special = (token) => /^<.*>$/.test(token);
  const gap = (token) => (token.startsWith("▁") || special(token) ? " " : "");

  // Scroll a box, and nothing around it, until a child of it can be seen.
  function reveal(box, child) {
    if (!child || box.scrollHeight <= box.clientHeight) return;
    const above = child.offsetTop - box.scrollTop;
    if (above < 0 || above + child.offsetHeight > box.clientHeight) {
      box.scrollTop = child.offsetTop - box.clientHeight / 2;
    }
  }

  function quoted(token, language) {
    return make("span", { class: "quoted" }, "“", written(plain(token), language), "”");
  }

  function rightToLeft(tokens) {
    const text = tokens.join("");
    const right = (text.match(/[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/g) || []).length;
    const left = (text.match(/\p{L}/gu) || []).length - right;
    return right > left;
  }

  // As many digits as the stored levels support, four at most.
  function digits(value, error, most = 4) {
    const supported = error > 0 ? Math.floor(-Math.log10(2 * error)) : most;
    const kept = clamp(supported, 0, most);
    const text = value.toFixed(kept);
    return value > 0 && !Number(text) ? `<${(10 ** -kept).toFixed(kept)}` : text;
  }

  function percent(p) {
    if (p === null) return "?";
    if (p > 0 && p < 0.001) return "<0.1%";
    return p >= 0.0995 && p < 0.9995 ? `${Math.round(p * 100)}%`
      : p >= 0.9995 ? "100%" : `${(p * 100).toFixed(1)}%`;
  }

  const largestOf = (numbers) => numbers.reduce((a, b) => Math.max(a, b), 0);

  const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

  // ---- weights ----------------------------------------------------------------------------

  function bytesOf(letters) {
    const text = atob(letters);
    const bytes = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
    return new Blob([bytes]);
  }

  function inflate(letters) {
    const stream = bytesOf(letters).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }

  async function unpack(view) {
    if (view.values) return;
    if (view.placement) {
      const { placement } = view;
      placement.query_tokens = new Int32Array(await inflate(placement.query_tokens));
      placement.key_tokens = new Int32Array(await inflate(placement.key_tokens));
      view.rows = Array.from(placement.query_tokens,
        (token) => tokenName(placement.query_grid, token));
      view.columns = Array(placement.keys_per_query).fill("");
    }
    const buffer = await inflate(view.weights);
    const largest = view.heads.length * view.rows.length;
    view.largest = new Float32Array(buffer, 0, largest);
    view.values = view.levels > 255
      ? new Uint16Array(buffer, largest * 4) : new Uint8Array(buffer, largest * 4);
    view.weights = null;
  }

  // The weights of one head, or of all together, as rows x columns.
  function weightsOf(view, head) {
    const q = view.rows.length, k = view.columns.length, count = view.heads.length;
    const heads = typeof head === "number" ? [head] : [...Array(count).keys()];
    const result = new Float32Array(q * k);
    for (const h of heads) {
      for (let i = 0; i < q; i++) {
        const unit = view.largest[h * q + i] / view.levels;
        const from = (h * q + i) * k;
        for (let j = 0; j < k; j++) {
          const weight = view.values[from + j] * unit;
          if (head === "max") result[i * k + j] = Math.max(result[i * k + j], weight);
          else result[i * k + j] += weight / heads.length;
        }
      }
    }
    return result;
  }

  function rowTops(weights, q, k) {
    const tops = new Float32Array(q);
    for (let i = 0; i < q; i++) tops[i] = largestOf(weights.subarray(i * k, (i + 1) * k));
    return tops;
  }

  let shown = null; // the matrix on the screen
  function current() {
    const view = pictures[state.picture].views[state.view];
    if (shown && shown.view === view && shown.head === state.head) return shown;
    const weights = weightsOf(view, state.head);
    const q = view.rows.length, k = view.columns.length;
    const tops = rowTops(weights, q, k), top = largestOf(tops);
    const errors = new Float32Array(q);
    for (let i = 0; i < q; i++) {
      for (let h = 0; h < view.heads.length; h++) {
        if (typeof state.head === "number" && h !== state.head) continue;
        errors[i] = Math.max(errors[i], view.largest[h * q + i] / view.levels / 2);
      }
    }
    shown = { view, head: state.head, weights, q, k, tops, top, errors };
    return shown;
  }

  // ---- places on an image -------------------------------------------------------------------

  const cellsOf = (grid) => grid.height * grid.width;

  function tokenName(grid, token) {
    const at = token - grid.names.length;
    if (at < 0) return grid.names[token];
    if (grid.seconds) return `${((at % grid.width) * grid.seconds).toFixed(2)} s`;
    return `${at % grid.width}, ${Math.floor(at / grid.width)}`;
  }

  // The token at a query point of the image; null is all of them.
  function tokenAt(grid, query) {
    const names = grid.names.length;
    if (query === "mean" || (query === "class" && !names)) return null;
    if (typeof query === "number") return query;
    if (query === "class" || !cellsOf(grid)) return 0;
    const cell = (share, step, most) => clamp(Math.floor(share / step), 0, most - 1);
    return names + cell(query[1], grid.cell_height, grid.height) * grid.width
      + cell(query[0], grid.cell_width, grid.width);
  }

  // The row of the query there, or at the nearest place that was kept.
  function queryRow({ query_grid: grid, query_tokens: tokens }, query) {
    const token = tokenAt(grid, query);
    if (token === null) return null;
    const found = tokens.indexOf(token);
    if (found >= 0) return found;
    const { names, width } = grid;
    const [x, y] = [(token - names.length) % width, Math.floor((token - names.length) / width)];
    let best = 0, least = Infinity;
    tokens.forEach((other, row) => {
      const at = other - names.length;
      const far = Math.hypot((at % width) - x, Math.floor(at / width) - y);
      if (at >= 0 && far < least) [best, least] = [row, far];
    });
    return best;
  }

  // How much each token of an image is attended to from a query point.
  function tokenWeights(view, head, query) {
    const { placement, largest, values, levels } = view;
    const { key_grid: grid, key_tokens: keys, keys_per_query: k } = placement;
    const q = placement.query_tokens.length, shared = keys.length === k;
    const heads = typeof head === "number" ? [head] : [...view.heads.keys()];
    const row = queryRow(placement, query);
    const rows = row === null ? [...Array(q).keys()] : [row];
    const tokens = new Float32Array(grid.names.length + cellsOf(grid));
    let error = 0, outside = 0, most = 0, inside = 0;
    for (const i of rows) {
      for (const h of heads) error = Math.max(error, largest[h * q + i] / levels / 2);
      for (let j = 0; j < k; j++) {
        let weight = 0;
        for (const h of heads) {
          const one = (values[(h * q + i) * k + j] * largest[h * q + i]) / levels;
          weight = head === "max" ? Math.max(weight, one) : weight + one / heads.length;
        }
        const token = keys[shared ? j : i * k + j];
        if (token < 0) outside += weight / rows.length;
        else {
          tokens[token] += weight / rows.length;
          inside += 1;
        }
      }
    }
    for (const h of heads) {
      for (let i = 0; i < q; i++) most = Math.max(most, largest[h * q + i]);
    }
    const cells = tokens.subarray(grid.names.length);
    // even is what each would get where attention is uniform
    const even = inside ? rows.length / inside : 0;
    return { row, tokens, cells, top: largestOf(cells), most, error, outside, even };
  }

  const HEAT = [[43, 15, 84], [140, 41, 129], [228, 80, 107], [254, 159, 109], [252, 253, 191]];
  function heat(s) {
    const at = clamp(s, 0, 1) * (HEAT.length - 1);
    const from = Math.min(HEAT.length - 2, Math.floor(at));
    return HEAT[from].map((value, c) => value + (HEAT[from + 1][c] - value) * (at - from));
  }

  // The photo, paled, with a map over it and a frame around the cell that looks.
  function paintOn(context, picture, view, found, width, height) {
    const { query_grid: queries, key_grid: keys } = view.placement;
    context.imageSmoothingEnabled = picture.bitmap.width > width;
    context.filter = "grayscale(0.7) brightness(0.62)";
    context.drawImage(picture.bitmap, 0, 0, width, height);
    context.filter = "none";
    if (cellsOf(keys)) {
      const pixels = new ImageData(keys.width, keys.height);
      found.cells.forEach((weight, at) => {
        let s = strength(weight, found.most, found.top);
        // a token that stays itself through all layers would leave the others dark
        if (view.kind === "rollout" && state.scale === "row") s = Math.sqrt(s);
        pixels.data.set([...heat(s), 255 * (0.12 + 0.8 * Math.sqrt(Math.min(1, s)))], at * 4);
      });
      const small = make("canvas", { width: keys.width, height: keys.height });
      small.getContext("2d").putImageData(pixels, 0, 0);
      context.imageSmoothingEnabled = view.kind === "cross";
      context.drawImage(small, 0, 0,
        keys.width * keys.cell_width * width, keys.height * keys.cell_height * height);
    }
    const token = found.row === null ? -1
      : view.placement.query_tokens[found.row] - queries.names.length;
    if (token >= 0) {
      context.strokeStyle = "#35f0ff";
      context.lineWidth = width > 300 ? 2 : 1;
      context.strokeRect((token % queries.width) * queries.cell_width * width,
        Math.floor(token / queries.width) * queries.cell_height * height,
        queries.cell_width * width, queries.cell_height * height);
    }
    const word = picture.recording?.words[state.word];
    if (word) {
      const [from, to] = [word[1], word[2]].map((s) => (s / picture.recording.seconds) * width);
      context.fillStyle = "rgba(255, 255, 255, .22)";
      context.fillRect(from, 0, Math.max(1, to - from), height);
      context.fillStyle = "#35f0ff";
      context.fillRect(from, 0, 1.5, height);
      context.fillRect(to - 1.5, 0, 1.5, height);
    }
  }

  // How strongly a weight is drawn, from 0 to 1.
  function strength(weight, top, rowTop) {
    if (state.scale === "row") return rowTop ? weight / rowTop : 0;
    const share = top ? weight / top : 0;
    return state.scale === "root" ? Math.sqrt(share) : share;
  }

  // ---- colour -----------------------------------------------------------------------------

  let ramp = [];
  function readColours() {
    const style = getComputedStyle(document.documentElement);
    const stops = ["--ramp-low", "--accent", "--ramp-high"].map((name) => {
      const hex = style.getPropertyValue(name).trim().slice(1);
      return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
    });
    ramp = [...Array(256).keys()].map((level) => {
      const at = (level / 255) * 1.55; // the accent stands at two thirds
      const [from, to, t] = at < 1 ? [stops[0], stops[1], at] : [stops[1], stops[2], at - 1];
      return from.map((value, c) => Math.round(value + (to[c] - value) * t));
    });
  }
  const level = (s) => ramp[clamp(Math.round(s * 255), 0, 255)];
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function paint(element, s) {
    if (s === null || s < 0.004) {
      element.style.backgroundColor = "";
      element.style.color = "";
      return;
    }
    const [r, g, b] = level(s);
    element.style.backgroundColor = `rgb(${r}, ${g}, ${b})`;
    const light = (0.299 * r + 0.587 * g + 0.114 * b) / 255;
    element.style.color = light > 0.55 ? "#11151c" : "#ffffff";
  }

  // The scale of a legend: colours from left to right.
  function drawScale(canvas, colour) {
    const context = canvas.getContext("2d");
    const strip = context.createImageData(256, 1);
    for (let x = 0; x < 256; x++) strip.data.set([...colour(x / 255), 255], x * 4);
    context.putImageData(strip, 0, 0);
  }

  // A canvas of the wanted size in CSS pixels, sharp, and no larger than phones allow.
  function size(canvas, width, height) {
    const most = Math.sqrt(16e6 / Math.max(1, width * height));
    const ratio = Math.min(window.devicePixelRatio || 1, most);
    canvas.width = Math.max(1, Math.round(width * ratio));
    canvas.height = Math.max(1, Math.round(height * ratio));
    const context = canvas.getContext("2d");
    context.setTransform(canvas.width / width, 0, 0, canvas.height / height, 0, 0);
    return context;
  }

  // One pixel a cell, or the largest of several cells where there are too many.
  function image(weights, q, k, top, tops, most) {
    const height = Math.min(q, most), width = Math.min(k, most);
    const levels = new Float32Array(width * height);
    for (let i = 0; i < q; i++) {
      const y = Math.floor((i * height) / q);
      for (let j = 0; j < k; j++) {
        const at = y * width + Math.floor((j * width) / k);
        levels[at] = Math.max(levels[at], strength(weights[i * k + j], top, tops[i]));
      }
    }
    const pixels = new ImageData(width, height);
    levels.forEach((s, at) => pixels.data.set([...level(s), 255], at * 4));
    const canvas = make("canvas", { width, height });
    canvas.getContext("2d").putImageData(pixels, 0, 0);
    return canvas;
  }

  // ---- the keyboard -----------------------------------------------------------------------

  // One stop of the Tab key for a whole group, inside which the arrows move.
  function roving(group, selector) {
    const items = () => [...group.querySelectorAll(selector)];
    const first = group.querySelector(selector);
    if (first) first.tabIndex = 0;
    group.addEventListener("focusin", (event) => {
      const item = event.target.closest(selector);
      if (!item) return;
      for (const other of items()) other.tabIndex = other === item ? 0 : -1;
    });
    group.addEventListener("keydown", (event) => {
      const all = items();
      const at = all.indexOf(event.target.closest(selector));
      if (at < 0) return;
      const flip = getComputedStyle(group).direction === "rtl" ? -1 : 1;
      const moves = { ArrowDown: 1, ArrowRight: flip, ArrowUp: -1, ArrowLeft: -flip };
      const next = event.key in moves ? at + moves[event.key]
        : event.key === "Home" ? 0 : event.key === "End" ? all.length - 1 : null;
      if (next === null) return;
      event.preventDefault();
      all[clamp(next, 0, all.length - 1)].focus();
    });
  }

  // What an arrow key means as [across, down].
  const ARROWS = {
    ArrowDown: [0, 1], ArrowUp: [0, -1], ArrowRight: [1, 0], ArrowLeft: [-1, 0],
  };

  // Tell the items of a group that are pointed at, focused (null when left), or clicked.
  function pointing(group, selector, onhover, onclick) {
    const over = (listen) => (event) => {
      const item = event.target.closest(selector);
      if (item) listen(Number(item.dataset.at));
    };
    for (const type of ["pointerover", "focusin"]) group.addEventListener(type, over(onhover));
    for (const type of ["pointerleave", "focusout"]) {
      group.addEventListener(type, () => onhover(null));
    }
    group.addEventListener("click", over(onclick));
    roving(group, selector);
  }

  // ---- the frame --------------------------------------------------------------------------

  const live = make("p", { class: "hidden", "aria-live": "polite" });
  const tip = make("div", { class: "tip", role: "tooltip", hidden: true });
  const panel = make("section", { id: "panel", role: "tabpanel", tabindex: "-1" });
  const TABS = {
    image: "On the image", head: "Head view", matrix: "Matrix", model: "Model view",
    steps: "Steps", tiles: "Images", tree: "Beams",
  };
  let redraw = () => {}; // draws the canvases of the open tab again, after a change of size
  let refresh = () => {}; // shows the hovered or pinned token

  const nameOf = (view, head) => {
    if (view.heads.length === 1) return headName(view.heads[0]);
    return typeof head === "number" ? headName(view.heads[head])
      : `${head} of ${view.heads.length} heads`;
  };
  const headName = (name) => (/^\d/.test(name) ? `head ${name}` : `${name} of heads`);

  // Heads can be taken together unless one of them is such a mean already.
  const joined = (view) => view.heads.length > 1 && view.heads.every((name) => /^\d/.test(name));
  const together = (view, head = "mean") => (joined(view) ? head : 0);

  function open(changes) {
    Object.assign(state, changes);
    const picture = pictures[state.picture];
    const view = picture.views[state.view];
    if (view) {
      if (typeof state.head !== "number") state.head = together(view, state.head);
      else if (state.head >= view.heads.length) state.head = together(view);
      const inside = (mark) => mark && mark.at < view[mark.side].length;
      if (!inside(state.pin)) state.pin = null;
    }
    state.hover = state.over = state.word = null;
    tip.hidden = true;
    build();
    remember();
  }

  // The address keeps what is open, so that a link or a reload comes back to it.
  function remember() {
    const view = pictures[state.picture].views[state.view];
    const parts = new URLSearchParams({ tab: state.tab, picture: state.picture });
    if (view) {
      parts.set("layer", view.name);
      parts.set("head", typeof state.head === "number" ? view.heads[state.head] : state.head);
    }
    try {
      history.replaceState(null, "", `#${parts}`);
    } catch { /* a page inside a notebook has no address */ }
  }

  function startAt(layer, head) {
    const views = pictures[state.picture].views;
    const crosses = views.map((view, at) => [view, at]).filter(([view]) => view.kind === "cross");
    const found = views.findIndex((view) => view.name === layer);
    const last = crosses.length ? crosses.at(-1)[1] : Math.max(0, views.length - 1);
    state.view = found >= 0 ? found : last;
    if (!views.length) return;
    const at = views[state.view].heads.indexOf(head ?? "");
    state.head = at >= 0 ? at : together(views[state.view], head === "max" ? "max" : "mean");
  }

  async function show(at) {
    state.picture = at;
    state.pin = state.step = null;
    shown = null;
    const picture = pictures[at];
    await Promise.all(picture.views.map(unpack));
    if (picture.photo) {
      picture.bitmap ??= await createImageBitmap(bytesOf(picture.photo));
      state.scale = "row";
    }
    if (picture.recording) await unpackRecording(picture.recording);
    silence();
    for (const tile of picture.tiles) tile[2] ??= await createImageBitmap(bytesOf(tile[1]));
    state.query = picture.query;
    startAt(...(picture.opens || [null, null]));
  }

  function tabs() {
    const picture = pictures[state.picture];
    const placed = picture.views.some((view) => view.placement);
    return Object.keys(TABS).filter((tab) => {
      if (tab === "steps" || tab === "tiles") return picture[tab].length;
      if (tab === "tree") return picture.tree;
      return picture.views.length && (tab === "model" || (tab === "image") === placed);
    });
  }

  function build() {
    const picture = pictures[state.picture];
    const focus = document.activeElement && document.activeElement.id;
    if (!tabs().includes(state.tab)) state.tab = tabs()[0];
    page.replaceChildren(...[
      make("h1", {
        text: picture.title, dir: "auto", class: picture.title === picture.source.text ? "hidden" : "",
      }),
      probes > 1 ? chooser() : null,
      texts(picture),
      tabs().length ? tabBar() : make("p", { class: "soft", text: "There is nothing to look at." }),
      picture.views.length ? controls(picture) : null,
      panel,
      footer(picture),
      live,
      tip,
    ].filter(Boolean));
    panel.setAttribute("aria-labelledby", `tab-${state.tab}`);
    redraw = refresh = () => {};
    panel.replaceChildren();
    ({
      image: imageView, head: headView, matrix: matrixView, model: modelView, steps: stepView,
      tiles: tileView, tree: treeView,
    })[state.tab]?.();
    if (focus && document.getElementById(focus)) document.getElementById(focus).focus();
  }

  // A list to choose from: pairs of a value and its text.
  function selection(id, options, value, choose, settings = {}) {
    return make("select", { id, ...settings, onchange: (event) => choose(event.target.value) },
      ...options.map(([key, text]) => make("option", {
        value: String(key), text, selected: key === value,
      })));
  }

  function chooser() {
    const options = pictures.slice(0, probes).map((picture, at) => (
      [at, `${at + 1}. ${picture.source.text || picture.title}`.slice(0, 90)]));
    return make("p", { class: "controls" }, selection("picture", options, state.picture % probes,
      async (at) => {
        await show(state.picture - state.picture % probes + Number(at));
        open({});
      }, { "aria-label": "Text" }));
  }

  // ---- the steps of a training ------------------------------------------------------------

  // Another step of the same probe, with the layer, head and token that are open.
  async function turnTo(moment) {
    const { view, head, pin, query } = state;
    await show(moment * probes + state.picture % probes);
    open({ view, head, pin, query });
  }

  // It stands beside what is built anew for each picture, or it could not be dragged.
  function stepSlider() {
    let playing = null;
    const now = () => Math.floor(state.picture / probes);
    const slider = make("input", {
      id: "moment", type: "range", min: "0", max: String(moments.length - 1),
      "aria-label": "Step of the training",
      oninput: () => {
        if (playing) button.click();
        go(Number(slider.value));
      },
    });
    const label = make("span", { class: "soft" });
    const button = make("button", {
      id: "play", type: "button", text: "Play",
      onclick: () => {
        if (playing) {
          clearInterval(playing);
          playing = null;
        } else {
          playing = setInterval(() => {
            go((now() + 1) % moments.length);
          }, 400);
        }
        button.textContent = playing ? "Stop" : "Play";
      },
    });
    const tell = () => {
      slider.value = String(now());
      label.textContent = `step ${moments[now()].toLocaleString("en")}`;
      slider.setAttribute("aria-valuetext", label.textContent);
    };
    const go = async (moment) => {
      await turnTo(moment);
      tell();
      if (playing && moment === moments.length - 1) button.click();
    };
    tell();
    return make("div", { class: "player" }, button, slider, label);
  }

  function texts(picture) {
    const box = make("div", { class: "texts" });
    for (const [label, { text, language }] of [
      ["Source", picture.source], ["Output", picture.output],
    ]) {
      if (!text) continue;
      box.append(make("div", {}, make("span", { class: "label", text: label }),
        make("p", { text, lang: language || null, dir: "auto" })));
    }
    if (!picture.alternatives.length) return box;
    const items = picture.alternatives.map(([{ text, language }, score]) => make("li", {},
      make("bdi", { text, lang: language || null, dir: "auto" }),
      score === null ? null : make("span", { text: score.toFixed(3) })));
    const list = make("ol", { start: "2" }, ...items);
    const count = picture.alternatives.length;
    return make("div", {}, box, make("details", {},
      make("summary", { text: `${count} more ${count === 1 ? "output" : "outputs"}` }), list));
  }

  function footer(picture) {
    const stored = picture.views[0] && picture.views[0].levels === 255
      ? "Weights are kept in 256 levels of each row's largest, and shown with fitting digits."
      : null;
    const few = picture.views.some(({ placement }) => placement && placement.query_tokens.length
      < placement.query_grid.names.length + cellsOf(placement.query_grid));
    return make("footer", {},
      few ? make("p", { text: "Only some places of the image were kept; the nearest is shown." })
        : null,
      picture.note ? make("p", { text: picture.note, dir: "auto" }) : null,
      stored ? make("p", { text: stored }) : null);
  }

  function tabBar() {
    const bar = make("div", { class: "tabs", role: "tablist", "aria-label": "Views" });
    for (const tab of tabs()) {
      bar.append(make("button", {
        id: `tab-${tab}`, role: "tab", type: "button", "aria-controls": "panel",
        text: tab === "image" && pictures[state.picture].recording ? "On the sound" : TABS[tab],
        "aria-selected": String(tab === state.tab), tabindex: "-1", onclick: () => open({ tab }),
      }));
    }
    roving(bar, "button");
    for (const button of bar.children) button.tabIndex = button.id === `tab-${state.tab}` ? 0 : -1;
    return bar;
  }

  // A choice among a few: radio buttons, which every keyboard already knows.
  function choices(name, label, options, value, choose) {
    const row = make("div", { class: "choices" });
    for (const [key, text, title] of options) {
      row.append(make("label", { title }, make("input", {
        type: "radio", name, id: `${name}-${key}`, value: String(key), checked: key === value,
        onchange: () => choose(key),
      }), make("span", { text })));
    }
    return make("fieldset", {}, make("legend", { class: "label", text: label }), row);
  }

  function controls(picture) {
    const view = picture.views[state.view];
    const box = make("div", { class: "controls" });
    if (state.tab !== "model") {
      const layers = picture.views.map((each, at) => [at, each.name]);
      box.append(make("label", {}, make("span", { class: "label", text: "Layer" }),
        selection("layer", layers, state.view, (at) => open({ view: Number(at) }))));
      if (view.heads.length > 1) {
        const heads = [...(joined(view) ? ["mean", "max"] : []), ...view.heads.keys()]
          .map((head) => [head, view.heads[head] ?? head, nameOf(view, head)]);
        box.append(choices("heads", "Head", heads, state.head, (head) => open({ head })));
      }
    }
    if (view.placement) {
      const { names } = view.placement.query_grid;
      const words = view.kind === "cross";
      const queries = words ? [["mean", "all words"], ...names.entries()]
        : [...(names.length ? [["class", names[0]]] : []),
          ["mean", picture.recording ? "all moments" : "all places"],
          ["place", picture.recording ? "a moment" : "a place"]];
      const kind = Array.isArray(state.query) ? "place" : names.length ? state.query : "mean";
      box.append(choices("query", words ? "Word" : "Looks from", queries, kind, (query) => {
        state.query = query === "place" ? [0.5, 0.5] : query;
        if (state.tab === "model") open({});
        else refresh();
      }));
    }
    if (state.tab === "head" && mostTokens(view) <= MOST_LINES) {
      box.append(choices("style", "Drawn as", [["lines", "lines"], ["text", "shaded text"]],
        styleOf(view), (style) => open({ style })));
    }
    if (state.tab === "matrix" && mostTokens(view) > LINES) {
      box.append(choices("zoom", "Zoom", [1, 2, 4, 8].map((zoom) => [zoom, `${zoom}×`]),
        state.zoom, (zoom) => open({ zoom })));
    }
    const scales = [["linear", "linear"], ["root", "square root"],
      ["row", view.placement ? "each map by itself" : "row by row"]];
    box.append(make("label", {}, make("span", { class: "label", text: "Shading" }),
      selection("scale", scales, state.scale, (scale) => open({ scale }))));
    return box;
  }

  const mostTokens = (view) => Math.max(view.rows.length, view.columns.length);
  const styleOf = (view) => {
    if (mostTokens(view) > MOST_LINES) return "text";
    return state.style || (mostTokens(view) <= LINES ? "lines" : "text");
  };

  const same = (a, b) => Boolean(a && b && a.side === b.side && a.at === b.at);

  function togglePin(mark) {
    state.pin = same(mark, state.pin) ? null : mark;
    refresh();
  }

  // ---- the panel beside: where one token looks ----------------------------------------------

  function sidesOf(view) {
    const decoder = view.kind === "cross";
    return {
      rows: decoder || view.writes ? "Writing" : "Looks from",
      columns: decoder ? "Source" : "Looks at",
    };
  }

  // Isolated, so that right-to-left tokens leave the order of what stands around them alone.
  const isolated = (token) => `\u2068${plain(token)}\u2069`;

  function rowLabel(view, at) {
    const token = isolated(view.rows[at]);
    return view.writes ? `${token} → ${isolated(view.writes[at])}` : token;
  }

  function line(mark) {
    const { view, weights, q, k, errors } = current();
    const count = mark.side === "rows" ? k : q;
    return [...Array(count).keys()].map((at) => {
      const [i, j] = mark.side === "rows" ? [mark.at, at] : [at, mark.at];
      return {
        at, i, j, weight: weights[i * k + j], error: errors[i],
        token: mark.side === "rows" ? view.columns[j] : rowLabel(view, i),
      };
    });
  }

  function bars(entries) {
    const box = make("div", { class: "bars" });
    for (const { token, language, share, value, chosen } of entries) {
      const fill = make("i", chosen ? { class: "chosen" } : {});
      fill.style.width = `${clamp(share, 0, 1) * 100}%`;
      const mark = chosen ? " chosen" : "";
      box.append(make("span", { class: `name${mark}`, title: token }, written(token, language)),
        make("span", { class: "track" }, fill),
        make("span", { class: `value${mark}`, text: value }));
    }
    return box;
  }

  function detail(aside, cell = null) {
    const { view, weights, q, k, errors } = current();
    const mark = state.hover || state.pin;
    let title, entries, hint;
    if (!mark) {
      const error = errors.reduce((a, b) => a + b, 0) / q;
      entries = view.columns.map((token, j) => {
        let sum = 0;
        for (let i = 0; i < q; i++) sum += weights[i * k + j];
        return { token, weight: sum / q, error };
      });
      const effects = view.heads.includes("against"); // of what was cut
      title = make("h2", { text: effects ? "Log p lost when cut" : "Most looked at, on average" });
      hint = "Point at a token, or walk with the arrow keys. A click or Enter pins it.";
    } else {
      entries = line(mark);
      const token = view[mark.side][mark.at];
      const language = view[`${mark.side}_language`];
      if (mark.side === "columns") title = make("h2", {}, "Who looks at ", quoted(token, language));
      else if (view.writes) {
        title = make("h2", {}, "At ", quoted(token, language), ", writing ",
          quoted(view.writes[mark.at], language));
      } else title = make("h2", {}, quoted(token, language), " looks at");
      hint = `Position ${mark.at + 1} of ${view[mark.side].length}.`
        + (same(mark, state.pin)
          ? " Pinned: click again or press Escape to let go." : "");
      if (cell) hint = `Row ${cell.i + 1}, column ${cell.j + 1}.`;
    }
    const other = mark && mark.side === "columns" ? "rows" : "columns";
    const best = [...entries].sort((a, b) => b.weight - a.weight).slice(0, 8);
    aside.replaceChildren(title, bars(best.map(({ token, weight, error }) => ({
      token, language: view[`${other}_language`], value: digits(weight, error),
      share: weight / Math.max(1, best[0].weight), // an effect may be larger than 1
    }))), make("p", { class: "soft hint", text: hint }));
    return best;
  }

  function speak(best) {
    const mark = state.hover || state.pin;
    if (!mark) return;
    const view = current().view;
    const from = mark.side === "rows" ? rowLabel(view, mark.at) : plain(view.columns[mark.at]);
    live.textContent = `${from}: ` + best.slice(0, 3)
      .map(({ token, weight, error }) => `${plain(token)} ${digits(weight, error)}`).join(", ");
  }

  // ---- on the image -----------------------------------------------------------------------

  function imageView() {
    const picture = pictures[state.picture];
    const view = picture.views[state.view];
    const { query_grid: queries, key_grid: keys } = view.placement;
    const canvas = make("canvas");
    const box = make("div", {
      class: "photo", tabindex: "0", role: "application",
      "aria-label": `${view.name}, ${nameOf(view, state.head)}, over the image: ${queries.width} by `
        + `${queries.height} places. Move with the arrow keys.`,
    }, canvas);
    const scale = make("canvas", { width: 256, height: 1 });
    const most = make("span");
    const even = make("span", { class: "even" });
    const legend = make("div", { class: "legend" },
      make("span", { text: "0" }), scale, most, even);
    drawScale(scale, heat);
    const strip = picture.recording ? soundStrip(picture) : null;
    const plainCanvas = make("canvas", { class: "plain", "aria-hidden": "true" });
    const told = make("div");
    const aside = make("aside", { class: "detail", "aria-label": "Where it looks" },
      told, plainCanvas);
    panel.append(make("div", { class: "stage" },
      make("div", {}, legend, box, strip && strip.element), aside));

    redraw = () => {
      const { width, height } = picture.bitmap;
      const room = picture.recording ? Infinity : Math.min(620, 620 * width / height);
      const wide = Math.max(1, Math.min(box.parentElement.clientWidth, room));
      canvas.style.width = `${wide}px`;
      canvas.style.height = `${(wide * height) / width}px`;
      size(canvas, wide, (wide * height) / width);
      const small = plainCanvas.getContext("2d");
      [plainCanvas.width, plainCanvas.height] = [width, height];
      small.drawImage(picture.bitmap, 0, 0);
      if (strip) strip.draw(wide);
      refresh();
    };
    refresh = () => {
      const found = tokenWeights(view, state.head, state.over ?? state.query);
      const area = [parseFloat(canvas.style.width), parseFloat(canvas.style.height)];
      paintOn(canvas.getContext("2d"), picture, view, found, ...area);
      const top = state.scale === "row" ? found.top : found.most;
      most.textContent = digits(top, found.error);
      even.textContent = `even: ${digits(found.even, 0)}`
        + (found.row !== null && found.top < 2 * found.even ? " (so this map says little)" : "");
      const kind = Array.isArray(state.query) ? "place" : state.query;
      const chosen = document.getElementById(`query-${kind}`);
      if (chosen) chosen.checked = true;
      const best = Array.from(found.tokens, (weight, at) => (
        { token: tokenName(keys, at), weight, named: at < keys.names.length }))
        .sort((a, b) => b.named - a.named || b.weight - a.weight).slice(0, 8);
      if (found.outside > 0.0005) {
        best.splice(7, 1, { token: "outside", weight: found.outside });
      }
      const words = view.kind === "cross";
      const everything = words ? "words" : picture.recording ? "moments" : "places";
      const from = found.row === null ? `All ${everything} look, on average, at`
        : words || cellsOf(queries) ? `${view.rows[found.row]} looks at` : "The image is made of";
      told.replaceChildren(make("h2", { text: from }), bars(best.map(({ token, weight }) => ({
        token, share: found.top ? weight / Math.max(found.top, ...best.map((b) => b.weight)) : 0,
        value: digits(weight, found.error),
      }))), make("p", {
        class: "soft hint",
        text: (picture.recording ? "" : `Places are column, row of ${keys.width} × ${keys.height}. `)
          + (words ? "Choose a word, or walk with the arrow keys."
            : `Point at the ${picture.recording ? "spectrogram" : "image"}, or walk with the arrow `
              + "keys. A click stays there."),
      }));
      return best;
    };
    const say = (from, best) => {
      live.textContent = `${from}: `
        + best.slice(0, 3).map(({ token, weight }) => `${token} ${weight.toFixed(3)}`).join("; ");
    };
    const under = (event) => {
      const area = canvas.getBoundingClientRect();
      return [(event.clientX - area.left) / area.width, (event.clientY - area.top) / area.height];
    };
    if (cellsOf(queries)) {
      box.addEventListener("pointermove", (event) => {
        state.over = under(event);
        refresh();
      });
      box.addEventListener("pointerleave", () => {
        state.over = null;
        refresh();
      });
      box.addEventListener("click", (event) => {
        const query = under(event);
        const again = Array.isArray(state.query)
          && tokenAt(queries, query) === tokenAt(queries, state.query);
        state.query = again ? "class" : query;
        refresh();
      });
    }
    box.addEventListener("keydown", (event) => {
      if (!(event.key in ARROWS)) return;
      const [across, down] = ARROWS[event.key];
      if (view.kind === "cross") {
        event.preventDefault();
        const at = typeof state.query === "number" ? state.query + across + down : 0;
        state.query = clamp(at, 0, queries.names.length - 1);
        say(queries.names[state.query], refresh());
        return;
      }
      if (!cellsOf(queries)) return;
      event.preventDefault();
      const [x, y] = Array.isArray(state.query) ? state.query : [0.5, 0.5];
      const inside = (share) => clamp(share, 0, 0.9999);
      state.query = [inside(x + across * queries.cell_width), inside(y + down * queries.cell_height)];
      state.over = null;
      say(tokenName(queries, tokenAt(queries, state.query)), refresh());
    });
    redraw();
  }

  // ---- a recording --------------------------------------------------------------------------

  async function unpackRecording(recording) {
    if (recording.audio !== undefined) return;
    const samples = new Int16Array(await inflate(recording.samples));
    recording.audio = samples.length ? Float32Array.from(samples, (s) => s / 32768) : null;
    recording.samples = null;
    if (recording.posteriors) {
      recording.posteriors = new Uint8Array(await inflate(recording.posteriors));
    }
  }

  let player = null; // the sound that is heard: {context, source, from, to, at}
  function silence() {
    if (!player) return;
    player.source.onended = null;
    try { player.source.stop(); } catch { /* it has ended */ }
    player = null;
  }

  let loudspeaker = null;
  function play(recording, from, to, moved) {
    silence();
    if (!recording.audio) return;
    loudspeaker ??= new AudioContext();
    loudspeaker.resume();
    const buffer = loudspeaker.createBuffer(1, recording.audio.length, recording.rate);
    buffer.copyToChannel(recording.audio, 0);
    const source = loudspeaker.createBufferSource();
    source.buffer = buffer;
    source.connect(loudspeaker.destination);
    source.start(0, from, Math.max(0.02, to - from));
    const mine = player = { source };
    const began = loudspeaker.currentTime;
    const follow = () => {
      if (player !== mine) return moved(null);
      const now = from + loudspeaker.currentTime - began;
      moved(now < to ? now : null);
      if (now < to) requestAnimationFrame(follow);
    };
    source.onended = () => {
      if (player === mine) player = null;
      moved(null);
    };
    follow();
  }

  // Under a spectrogram: the words where they are said, and the posterior of each unit over time.
  function soundStrip(picture) {
    const { recording } = picture;
    const { words, units, seconds, posteriors } = recording;
    const share = (moment) => `${(100 * moment) / seconds}%`;
    const head = make("i", { class: "playhead", hidden: true });
    const moved = (now) => {
      head.hidden = now === null;
      if (now !== null) head.style.left = share(now);
    };
    const row = make("div", { class: "said", role: "group", "aria-label": "Words" });
    words.forEach(([text, from, to, p], at) => {
      const button = make("button", {
        class: "word", type: "button", tabindex: "-1", "data-at": String(at),
        title: `${text}: ${from.toFixed(2)} to ${to.toFixed(2)} s`
          + (p === null ? "" : `, ${percent(p)}`),
      }, written(text));
      button.style.left = share(from);
      button.style.width = share(to - from);
      row.append(button);
    });
    pointing(row, ".word", (at) => {
      state.word = at;
      const view = picture.views[state.view];
      const word = at === null ? null : words[at];
      // a word that was written asks for itself, any other layer from the middle of its stretch
      if (view.kind === "cross") {
        const same = view.placement.query_grid.names.length === words.length;
        state.over = word && same ? at : null;
      } else state.over = word ? [(word[1] + word[2]) / 2 / seconds, 0.5] : null;
      refresh();
    }, (at) => play(recording, words[at][1], words[at][2], moved));
    const canvas = make("canvas", { "aria-hidden": "true" });
    const button = recording.audio ? make("button", {
      class: "play", type: "button", text: "▶ Play",
      onclick: () => play(recording, 0, seconds, moved),
    }) : null;
    const stop = recording.audio ? make("button", {
      class: "play", type: "button", text: "■ Stop", onclick: silence,
    }) : null;
    const element = make("div", { class: "sound" },
      make("div", { class: "tracks" }, words.length ? row : null, canvas, head),
      make("div", { class: "buttons" }, button, stop, make("span", {
        class: "soft", text: words.length ? "A click on a word plays it." : "",
      })));
    const draw = (wide) => {
      element.style.width = `${wide}px`;
      const high = posteriors ? 96 : 18;
      canvas.style.width = `${wide}px`;
      canvas.style.height = `${high}px`;
      const context = size(canvas, wide, high);
      const floor = high - 16;
      context.font = `10px ${getComputedStyle(document.body).fontFamily}`;
      context.fillStyle = css("--soft");
      context.textAlign = "center";
      const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60].find((s) => (s / seconds) * wide >= 45) ?? 120;
      for (let at = 0; at <= seconds; at += step) {
        const x = clamp((at / seconds) * wide, 8, wide - 12);
        context.fillText(`${Number(at.toFixed(2))}${at ? "" : " s"}`, x, high - 4);
        context.fillRect((at / seconds) * wide, floor, 1, 3);
      }
      if (!posteriors) return;
      const count = units.length, frames = posteriors.length / count;
      const xOf = (t) => ((t + 0.5) / frames) * wide;
      const yOf = (value) => floor - (value / 255) * (floor - 14);
      units.forEach((unit, u) => {
        let top = 0;
        for (let t = 0; t < frames; t++) top = Math.max(top, posteriors[t * count + u]);
        if (unit && top < 26) return;
        context.beginPath();
        context.moveTo(xOf(0), floor);
        for (let t = 0; t < frames; t++) context.lineTo(xOf(t), yOf(posteriors[t * count + u]));
        context.lineTo(xOf(frames - 1), floor);
        if (!unit) {
          context.strokeStyle = css("--line");
          context.stroke();
          return;
        }
        context.fillStyle = `hsl(${Math.round(u * 137.5) % 360} 65% 55% / .6)`;
        context.fill();
        context.fillStyle = css("--ink");
        for (let t = 0; t < frames; t++) { // its name over each peak
          const value = posteriors[t * count + u];
          const before = t ? posteriors[(t - 1) * count + u] : 0;
          const after = t + 1 < frames ? posteriors[(t + 1) * count + u] : 0;
          if (value >= 128 && value >= before && value > after) {
            context.fillText(unit, xOf(t), yOf(value) - 3);
          }
        }
      });
    };
    return { element, draw };
  }

  // ---- images side by side ------------------------------------------------------------------

  function tileView() {
    const { tiles, tiles_per_row: across } = pictures[state.picture];
    const body = make("div", { class: `tiles${across ? " rows" : ""}` });
    if (across) body.style.setProperty("--across", String(across));
    for (const [name, , bitmap] of tiles) {
      const canvas = make("canvas", {
        width: bitmap.width, height: bitmap.height, role: "img", "aria-label": name,
      });
      canvas.getContext("2d").drawImage(bitmap, 0, 0);
      body.append(make("figure", {}, canvas, make("figcaption", { text: name })));
    }
    panel.append(body);
  }

  // ---- head view --------------------------------------------------------------------------

  function tokens(view, side, flow) {
    const group = make("div", {
      class: `${flow ? "flow" : "side"} ${side}`, role: "group", "aria-label": sidesOf(view)[side],
      dir: flow && rightToLeft(view[side]) ? "rtl" : "ltr",
    });
    const language = view[`${side}_language`];
    view[side].forEach((token, at) => {
      const pair = side === "rows" && view.writes;
      const face = make("span", {});
      if (pair && !flow) {
        face.append(make("span", { class: "before" }, written(token, language)),
          make("span", { class: "arrow", text: "→" }), written(view.writes[at], language));
      } else {
        const word = pair ? view.writes[at] : token;
        face.append(flow ? written(plain(word), language) : written(word, language));
      }
      const word = pair ? view.writes[at] : token;
      group.append(flow ? gap(word) : "", make("button", {
        class: `token${flow && special(word) ? " alone" : ""}`, type: "button", tabindex: "-1",
        "data-at": String(at),
        "data-side": side, "aria-pressed": "false",
        title: pair ? rowLabel(view, at) : null,
      }, face));
    });
    pointing(group, ".token", (at) => {
      state.hover = at === null ? null : { side, at };
      refresh();
    }, (at) => togglePin({ side, at }));
    return group;
  }

  function headView() {
    const { view } = current();
    const flow = styleOf(view) === "text";
    const names = sidesOf(view);
    const groups = { rows: tokens(view, "rows", flow), columns: tokens(view, "columns", flow) };
    const aside = make("aside", { class: "detail", "aria-label": "Where it looks" });
    const canvas = make("canvas", { "aria-hidden": "true" });
    let body;
    if (flow) {
      body = make("div", { class: "flows" }, ...["rows", "columns"].map((side) => make("div", {},
        make("span", { class: "label", text: names[side] }), groups[side])));
    } else {
      const few = mostTokens(view) <= 30;
      body = make("div", { class: "pair" },
        make("div", { class: "heading rows", text: names.rows }), make("span"),
        make("div", { class: "heading", text: names.columns }),
        groups.rows, make("div", { class: "middle" }, canvas), groups.columns);
      body.firstChild.style.textAlign = "end";
      body.style.setProperty("--row", few ? "32px" : "23px");
      body.style.setProperty("--letters", few ? "1rem" : ".85rem");
    }
    panel.append(make("div", { class: "stage" }, body, aside));

    refresh = () => {
      const { top } = current();
      const mark = state.hover || state.pin;
      const strengths = { rows: [], columns: [] };
      const entries = mark ? line(mark) : [];
      if (mark) {
        const other = mark.side === "rows" ? "columns" : "rows";
        const rowTop = Math.max(...entries.map((entry) => entry.weight));
        for (const { at, weight } of entries) {
          strengths[other][at] = strength(weight, top, rowTop);
        }
      }
      for (const side of ["rows", "columns"]) {
        [...groups[side].children].forEach((token, at) => {
          const is = (one) => same(one, { side, at });
          const s = strengths[side][at];
          paint(token, s === undefined ? null : s);
          token.classList.toggle("active", is(mark));
          token.classList.toggle("pinned", is(state.pin));
          token.setAttribute("aria-pressed", String(is(state.pin)));
          const entry = s === undefined ? null : entries[at];
          const visible = entry && entry.weight >= 0.005;
          token.setAttribute("data-value", visible ? digits(entry.weight, entry.error, 2) : "");
        });
      }
      const best = detail(aside);
      speak(best);
      if (!flow) drawLines(canvas, groups, mark);
      else if (mark) {
        const other = groups[mark.side === "rows" ? "columns" : "rows"];
        reveal(other, other.children[best[0].at]);
      }
    };
    redraw = refresh;
    refresh();
  }

  function drawLines(canvas, groups, mark) {
    const { weights, q, k, top, tops } = current();
    const box = canvas.parentElement;
    const width = box.clientWidth, height = box.clientHeight;
    if (!width || !height) return;
    const context = size(canvas, width, height);
    const base = box.getBoundingClientRect().top;
    const centre = (token) => {
      const area = token.getBoundingClientRect();
      return area.top + area.height / 2 - base;
    };
    const left = [...groups.rows.children].map(centre);
    const right = [...groups.columns.children].map(centre);
    context.strokeStyle = css("--accent");
    context.lineCap = "round";
    for (let i = 0; i < q; i++) {
      if (mark && mark.side === "rows" && mark.at !== i) continue;
      for (let j = 0; j < k; j++) {
        if (mark && mark.side === "columns" && mark.at !== j) continue;
        const s = strength(weights[i * k + j], top, tops[i]);
        if (s < 0.02) continue;
        context.globalAlpha = mark ? 0.15 + 0.85 * s : 0.75 * s;
        context.lineWidth = mark ? 1 + 4 * s : 0.6 + 1.8 * s;
        context.beginPath();
        context.moveTo(2, left[i]);
        context.bezierCurveTo(width * 0.4, left[i], width * 0.6, right[j], width - 2, right[j]);
        context.stroke();
      }
    }
    context.globalAlpha = 1;
  }

  // ---- matrix -----------------------------------------------------------------------------

  function matrixView() {
    const { view, q, k } = current();
    const corner = make("div", { class: "corner" });
    const above = make("canvas", { class: "above", lang: view.columns_language || null });
    const left = make("canvas", { class: "left", lang: view.rows_language || null });
    const canvas = make("canvas");
    const cursor = make("div", { class: "cursor", hidden: true });
    const cells = make("div", { class: "cells" }, canvas, cursor);
    const box = make("div", {
      class: "matrix", tabindex: "0", role: "application",
      "aria-label": `Matrix of ${view.name}, ${nameOf(view, state.head)}: ${q} rows, ${k} columns. `
        + "Move with the arrow keys.",
    }, corner, above, left, cells);
    const aside = make("aside", { class: "detail", "aria-label": "Where it looks" });
    const scale = make("canvas", { width: 256, height: 1 });
    const most = make("span");
    const legend = make("div", { class: "legend" }, make("span", { text: "0" }), scale, most);
    panel.append(make("div", { class: "stage" }, make("div", {}, box, legend), aside));
    let side = 1; // of a cell, in pixels
    let cell = null; // the one pointed at

    function labels(texts, context, widest) {
      const short = texts.map((text) => {
        let letters = Array.from(text);
        if (context.measureText(text).width <= widest) return text;
        while (letters.length > 1 && context.measureText(letters.join("")).width > widest - 12) {
          letters = letters.slice(0, -1);
        }
        return `${letters.join("")}…`;
      });
      return [short, Math.ceil(Math.max(...short.map((text) => context.measureText(text).width)))];
    }

    function place(element, width, height) {
      element.style.width = `${width}px`;
      element.style.height = `${height}px`;
      return element === corner ? null : size(element, width, height);
    }

    redraw = () => {
      const { weights, top, tops, errors } = current();
      const room = box.parentElement.clientWidth;
      const family = getComputedStyle(document.body).fontFamily;
      const widest = Math.min(130, room * 0.24);
      const measure = canvas.getContext("2d");
      const fontAt = (pixels) => `${clamp(pixels * 0.62, 9, 14)}px ${family}`;
      measure.font = fontAt(14);
      const rowTexts = view.rows.map((_, i) => rowLabel(view, i));
      const columnTexts = view.columns.map(isolated);
      const slanted = (length) => Math.ceil(length * Math.SQRT1_2);
      const guess = room - labels(rowTexts, measure, widest)[1] - 12
        - slanted(labels(columnTexts, measure, widest)[1]);
      const ratio = window.devicePixelRatio || 1;
      const whole = Math.floor((guess / k) * ratio) / ratio; // of the screen's own pixels
      const fit = clamp(whole, 1, mostTokens(view) > 24 ? 30 : 40);
      side = Math.min(40, fit * state.zoom);
      const font = fontAt(side);
      const every = Math.max(1, Math.ceil((parseFloat(font) + 2) / side));
      measure.font = font;
      const [rows, rowsWide] = labels(rowTexts, measure, widest);
      const [columns, columnsLong] = labels(columnTexts, measure, widest);
      const height = slanted(columnsLong) + 18;
      const tail = slanted(columnsLong) + 8; // where the last slanted label ends

      place(corner, rowsWide + 12, height);
      const write = (context) => {
        context.font = font;
        context.direction = "ltr";
        context.textBaseline = "middle";
        context.fillStyle = css("--soft");
      };
      const across = place(above, k * side + tail, height);
      write(across);
      for (let j = 0; j < k; j += every) {
        across.save();
        across.translate((j + 0.5) * side, height - 7);
        across.rotate(-Math.PI / 4);
        across.fillText(columns[j], 0, 0);
        across.restore();
      }
      const down = place(left, rowsWide + 12, q * side + 1);
      write(down);
      down.textAlign = "right";
      for (let i = 0; i < q; i += every) {
        down.fillText(rows[i], rowsWide + 4, Math.max((i + 0.5) * side, parseFloat(font) / 2));
      }

      const context = place(canvas, k * side + 1, q * side + 1);
      context.imageSmoothingEnabled = false;
      context.drawImage(image(weights, q, k, top, tops, 4096), 0, 0, k * side, q * side);
      context.strokeStyle = css("--line");
      if (side >= 12) {
        context.globalAlpha = 0.55;
        context.beginPath();
        for (let i = 1; i < q; i++) {
          context.moveTo(0, i * side + 0.5);
          context.lineTo(k * side, i * side + 0.5);
        }
        for (let j = 1; j < k; j++) {
          context.moveTo(j * side + 0.5, 0);
          context.lineTo(j * side + 0.5, q * side);
        }
        context.stroke();
        context.globalAlpha = 1;
      }
      context.strokeRect(0.5, 0.5, k * side, q * side);

      drawScale(scale, (s) => level(state.scale === "root" ? Math.sqrt(s) : s));
      most.textContent = state.scale === "row" ? "the largest of each row"
        : digits(top, Math.max(...errors));
      refresh();
    };

    // A frame around the cell pointed at, or around the whole row or column that is pinned.
    refresh = () => {
      const pin = state.pin;
      cursor.hidden = !cell && !pin;
      if (cell || pin) {
        const [i, rows] = cell ? [cell.i, 1] : pin.side === "rows" ? [pin.at, 1] : [0, q];
        const [j, columns] = cell ? [cell.j, 1] : pin.side === "rows" ? [0, k] : [pin.at, 1];
        const edge = side < 8 ? 2 : 1;
        cursor.style.left = `${j * side - edge}px`;
        cursor.style.top = `${i * side - edge}px`;
        cursor.style.width = `${columns * side + 2 * edge + 1}px`;
        cursor.style.height = `${rows * side + 2 * edge + 1}px`;
      }
      state.hover = cell ? { side: "rows", at: cell.i } : null;
      detail(aside, cell);
      state.hover = null;
    };

    const valueAt = (i, j) => digits(current().weights[i * k + j], current().errors[i]);
    function point(i, j, x, y) {
      cell = { i, j };
      refresh();
      tip.replaceChildren(written(rowLabel(view, i), view.rows_language), " looks at ",
        written(plain(view.columns[j]), view.columns_language), " ",
        make("strong", { text: valueAt(i, j) }));
      tip.hidden = false;
      const area = tip.getBoundingClientRect();
      tip.style.left = `${clamp(x + 14, 4, window.innerWidth - area.width - 8)}px`;
      const below = y + 18 + area.height <= window.innerHeight;
      tip.style.top = `${below ? y + 18 : y - area.height - 12}px`;
    }
    function away() {
      cell = null;
      tip.hidden = true;
      refresh();
    }
    const under = (event) => {
      const area = canvas.getBoundingClientRect();
      const j = Math.floor((event.clientX - area.left) / side);
      const i = Math.floor((event.clientY - area.top) / side);
      return i >= 0 && j >= 0 && i < q && j < k ? [i, j] : null;
    };
    const pinRow = (at) => togglePin({ side: "rows", at });
    cells.addEventListener("pointermove", (event) => {
      const found = under(event);
      if (found) point(...found, event.clientX, event.clientY);
      else away();
    });
    cells.addEventListener("pointerleave", away);
    box.addEventListener("blur", away);
    cells.addEventListener("click", (event) => {
      const found = under(event);
      if (found) pinRow(found[0]);
    });
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && cell) pinRow(cell.i);
      if (!(event.key in ARROWS)) return;
      event.preventDefault();
      const [across, down] = ARROWS[event.key];
      const from = cell || { i: -down, j: -across };
      const i = clamp(from.i + down, 0, q - 1);
      const j = clamp(from.j + across, 0, k - 1);
      const x = (j + 0.5) * side, y = (i + 0.5) * side;
      const wide = box.clientWidth - left.clientWidth, high = box.clientHeight - above.clientHeight;
      const hidden = (at, from, room) => at < from + side || at > from + room - side;
      if (hidden(x, box.scrollLeft, wide)) box.scrollLeft = x - wide / 2;
      if (hidden(y, box.scrollTop, high)) box.scrollTop = y - high / 2;
      const area = canvas.getBoundingClientRect();
      point(i, j, area.left + x, area.top + y);
      live.textContent = `${rowLabel(view, i)} looks at ${plain(view.columns[j])}: `
        + valueAt(i, j);
    });
    redraw();
  }

  // ---- model view -------------------------------------------------------------------------

  function modelView() {
    const { views } = pictures[state.picture];
    const body = make("div");
    const waiting = [];
    views.forEach((view, v) => {
      const thumbs = make("div", { class: "thumbs" });
      const heads = [...(joined(view) ? ["mean"] : []), ...view.heads.keys()];
      for (const head of heads) {
        const canvas = make("canvas", { width: 1, height: 1 });
        const name = nameOf(view, head);
        const button = make("button", {
          class: "thumb", type: "button", tabindex: "-1",
          "aria-current": String(v === state.view && head === state.head),
          "aria-label": `${view.name}, ${name}`,
          onclick: () => {
            const tab = view.placement ? "image" : "head";
            open({ view: v, head, tab });
            document.getElementById(`tab-${tab}`).focus({ preventScroll: true });
          },
        }, canvas, make("span", { text: typeof head === "number" ? view.heads[head] : head }));
        waiting.push(() => thumbnail(canvas, view, head));
        thumbs.append(button);
      }
      const { width, height } = view.placement?.key_grid ?? {};
      const shape = view.placement ? `${width} × ${height} places`
        : `${view.rows.length} × ${view.columns.length}`;
      body.append(make("section", { class: "layer" }, make("div", {},
        make("h2", { text: view.name }), make("span", { class: "label", text: shape })), thumbs));
    });
    panel.append(body);
    roving(body, ".thumb");
    // As many as fit in a frame, so that the page stays awake while hundreds are drawn.
    const work = () => {
      const end = performance.now() + 30;
      while (waiting.length && performance.now() < end) waiting.shift()();
      if (waiting.length && body.isConnected) requestAnimationFrame(work);
    };
    work();
  }

  function thumbnail(canvas, view, head) {
    if (view.placement) {
      const picture = pictures[state.picture];
      const { width, height } = picture.bitmap;
      canvas.style.aspectRatio = `${width} / ${height}`;
      [canvas.width, canvas.height] = [180, Math.round((180 * height) / width)];
      paintOn(canvas.getContext("2d"), picture, view, tokenWeights(view, head, state.query),
        canvas.width, canvas.height);
      return;
    }
    const weights = weightsOf(view, head);
    const q = view.rows.length, k = view.columns.length;
    const tops = rowTops(weights, q, k);
    const small = image(weights, q, k, largestOf(tops), tops, 128);
    canvas.width = small.width;
    canvas.height = small.height;
    canvas.getContext("2d").drawImage(small, 0, 0);
    canvas.style.aspectRatio = String(clamp(k / q, 0.5, 2));
  }

  // ---- steps ------------------------------------------------------------------------------

  function stepView() {
    const picture = pictures[state.picture];
    const { steps, steps_language: language } = picture;
    const fits = (view) => view.kind === "cross" && !view.placement
      && steps.every((step) => step.row < view.rows.length);
    let at = picture.views.length && fits(picture.views[state.view]) ? state.view : -1;
    let head = state.head;
    if (at < 0) {
      at = picture.views.findLastIndex(fits);
      head = at >= 0 ? together(picture.views[at]) : 0;
    }
    const view = at >= 0 ? picture.views[at] : null;
    const weights = view ? weightsOf(view, head) : null;

    const output = make("div", {
      class: "flow", dir: rightToLeft(steps.map((step) => step.token)) ? "rtl" : "ltr",
    });
    for (const { token } of steps) output.append(gap(token), chip(token, language));
    const strip = make("div", { class: "strip" },
      make("div", {}, make("span", { class: "label", text: "Written so far" }), output));
    const source = make("div", { class: "flow" });
    const caption = make("span", { class: "label" });
    if (view) {
      source.dir = rightToLeft(view.columns) ? "rtl" : "ltr";
      for (const token of view.columns) {
        source.append(gap(token), chip(token, view.columns_language));
      }
      strip.append(make("div", {}, caption, source));
    }
    const cards = make("div", { class: "cards" });
    steps.forEach((step, number) => cards.append(card(step, number, language)));
    panel.append(strip, cards);

    let hover = null;
    refresh = () => {
      const step = hover ?? state.step;
      [...cards.children].forEach((each, number) => {
        each.classList.toggle("active", number === step);
        each.setAttribute("aria-pressed", String(number === state.step));
      });
      [...output.children].forEach((each, number) => {
        each.classList.toggle("later", step !== null && number > step);
        each.classList.toggle("active", number === step);
      });
      reveal(output, output.children[step]);
      if (!view) return;
      const k = view.columns.length;
      const from = step === null ? 0 : steps[step].row * k;
      const row = step === null ? null : weights.subarray(from, from + k);
      const top = row ? Math.max(...row) : 0;
      const overall = state.scale === "row" ? top : largestOf(weights);
      [...source.children].forEach((each, j) =>
        paint(each, row ? strength(row[j], overall, top) : null));
      if (row) reveal(source, source.children[row.indexOf(top)]);
      caption.textContent = step === null
        ? "Source: point at a step to see where it looks"
        : `Source, shaded by ${view.name}, ${nameOf(view, head)}`;
    };
    pointing(cards, ".card", (at) => {
      hover = at;
      refresh();
    }, (at) => {
      state.step = state.step === at ? null : at;
      refresh();
    });
    refresh();
  }

  const chip = (token, language) => make("span", {
    class: `token${special(token) ? " alone" : ""}`,
  }, written(plain(token), language));

  function card(step, number, language) {
    const chosen = step.candidates.findIndex(([token]) => token === step.token);
    const entries = step.candidates.map(([token, p], at) => [token, p, at === chosen]);
    if (chosen < 0) entries.push([step.token, step.probability, true]);
    return make("button", {
      class: "card", type: "button", tabindex: "-1", "data-at": String(number),
      "aria-label": `Step ${number + 1}: ` + entries
        .map(([token, p, best]) => `${plain(token)} ${percent(p)}${best ? ", chosen" : ""}`)
        .concat(step.note || []).join("; "),
    }, make("header", {}, make("strong", {}, written(plain(step.token), language)),
      make("span", { class: "number", text: `step ${number + 1}` })),
    bars(entries.map(([token, p, chosen]) => ({
      token, language, chosen, share: p ?? 0, value: percent(p),
    }))), step.note ? make("p", { class: "why", text: step.note }) : "");
  }

  // ---- the tree of a beam search ----------------------------------------------------------

  function treeView() {
    const { tree, steps_language: language } = pictures[state.picture];
    const [wide, high] = [92, 24];
    const nodes = tree.nodes.map(
      ([parent, token, logprob, score, fate, best, step, line, when]) => (
        { parent, token, logprob, score, fate, best, step, line, when }));
    const box = make("div", { class: "tree", role: "list" });
    const across = Math.max(...nodes.map((node) => node.step)) + 2;
    const down = Math.max(...nodes.map((node) => node.line)) + 1;
    box.style.width = `${across * wide}px`;
    box.style.height = `${down * high}px`;
    const said = (number) => {
      const tokens = [];
      for (let at = number; at >= 0; at = nodes[at].parent) tokens.unshift(nodes[at].token);
      return tokens.map((token) => gap(token) + plain(token)).join("").trim();
    };
    const told = (number) => {
      const { logprob, score, fate, when } = nodes[number];
      return `${said(number)}: log-probability ${logprob.toFixed(2)}, score ${score.toFixed(2)}; `
        + tree.fates[fate] + (when ? `, ${when}` : "");
    };
    nodes.forEach((node, number) => {
      const before = nodes[node.parent];
      if (before) {
        const line = make("i", { class: node.best ? "best" : "" });
        line.style.left = `${before.step * wide + 6}px`;
        line.style.top = `${(before.line + 1) * high - 3}px`;
        line.style.width = `${wide + 50}px`;
        line.style.height = `${(node.line - before.line) * high}px`;
        box.append(line);
      }
      const item = make("span", {
        class: `node ${node.best ? "best" : node.fate.split(" ").join("-")}`, role: "listitem",
        "data-at": String(number), tabindex: "-1", "aria-label": told(number),
      }, written(plain(node.token), language),
      node.fate === "finished" ? make("small", { text: node.score.toFixed(2) }) : null);
      item.style.left = `${node.step * wide}px`;
      item.style.top = `${node.line * high}px`;
      box.append(item);
    });
    const caption = make("p", { class: "soft told", "aria-live": "polite" });
    const plainly = "Point at a token to see what became of it. "
      + (tree.end ? `The search ended as ${tree.end}.` : "");
    caption.textContent = plainly;
    pointing(box, ".node", (at) => {
      caption.textContent = at === null ? plainly : told(at);
    }, () => {});
    panel.append(caption, make("div", { class: "forest" }, box));
  }

  // ---- beginning --------------------------------------------------------------------------

  if (!("DecompressionStream" in window)) {
    page.replaceChildren("This page needs a browser of 2023 or later.");
    return;
  }
  if (!pictures.length) {
    page.replaceChildren("There is nothing to look at.");
    return;
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    state.pin = state.step = null;
    state.query = pictures[state.picture].query;
    refresh();
  });
  readColours();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    build();
  });
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's address bar coming and going
    width = window.innerWidth;
    redraw();
  });

  const wanted = new URLSearchParams(location.hash.slice(1));
  const first = Number(wanted.get("picture")) || 0;
  await show(pictures[first] ? first : 0);
  if (wanted.has("layer")) startAt(wanted.get("layer"), wanted.get("head"));
  open({ tab: wanted.get("tab") in TABS ? wanted.get("tab") : tabs()[0] ?? "head" });
  if (moments.length) page.before(stepSlider());
})();
