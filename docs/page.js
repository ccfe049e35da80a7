"use strict";
// The page to drag. Its parts: 1 small tools, 2 the fit of fit.py, 3 the schedules of
// schedules.py, 4 the state, which is also in the address, 5 charts, 6 to 9 the four steps, and
// 10 what connects them. x always is log2 of a learning rate, and t log2 of a number of tokens.

// -- 1 Small tools -------------------------------------------------------------------------

const { log2, min, max, abs, sqrt, round } = Math;
const $ = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const mean = (values) => sum(values) / values.length;
const unique = (values) => [...new Set(values)].sort((one, two) => one - two);
const clamp = (value, low, high) => min(max(value, low), high);
const safe = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const short = (value, digits = 2) => String(+value.toPrecision(digits));
const rate = (x) => (2 ** x).toPrecision(2);
const nats = (value) => value.toFixed(3);
const exponent = (base, [value, low, high]) =>  // as HTML
  `<span class="together">${base}<sup>${value.toFixed(2)}</sup> [${low.toFixed(2)}, ${high.toFixed(2)}]</span>`;

function size(tokens) {
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (tokens >= 0.9995 * unit) return short(tokens / unit, 3) + letter;
  return short(tokens, 3);
}

function interpolate(at, x, y) {
  const right = x.findIndex((value) => value >= at);
  const i = right < 0 ? x.length - 1 : max(right, 1);
  const share = clamp((at - x[i - 1]) / (x[i] - x[i - 1]), 0, 1);
  return y[i - 1] + share * (y[i] - y[i - 1]);
}

// -- 2 The fit, as in fit.py -----------------------------------------------------------------
//
// A row is a run: {shape, T, batch, beta, seed, x, loss}, with loss Infinity if it diverged.

function solve(matrix, target) {
  // Gaussian elimination with pivoting
  const n = target.length;
  const rows = matrix.map((row, i) => [...row, target[i]]);
  for (let i = 0; i < n; i++) {
    let pivot = i;
    for (let j = i; j < n; j++) if (abs(rows[j][i]) > abs(rows[pivot][i])) pivot = j;
    [rows[i], rows[pivot]] = [rows[pivot], rows[i]];
    for (let j = 0; j < n; j++) {
      if (j === i) continue;
      const factor = rows[j][i] / rows[i][i];
      for (let k = i; k <= n; k++) rows[j][k] -= factor * rows[i][k];
    }
  }
  return rows.map((row, i) => row[n] / row[i]);
}

function nearest(points, count) {
  const lowest = points.reduce((best, point) => (point[1] < best[1] ? point : best))[0];
  const distance = ([x]) => round(abs(x - lowest) * 100);  // equal for equal steps to both sides
  const sorted = [...points].sort((one, two) => distance(one) - distance(two));
  return sorted.slice(0, count).sort((one, two) => one[0] - two[0]);
}

function vertex(points) {
  // The minimum of a cubic through the 7 points nearest the lowest, or NaN.
  if (!points.length) return NaN;
  const lowest = points.reduce((best, point) => (point[1] < best[1] ? point : best))[0];
  if (lowest === points[0][0] || lowest === points.at(-1)[0]) return NaN;
  const near = nearest(points, 7).filter(([, loss]) => isFinite(loss));
  if (near.length < 5) return NaN;
  const moment = (p) => sum(near.map(([x]) => (x - lowest) ** p));
  const degrees = [0, 1, 2, 3];
  const normal = degrees.map((i) => degrees.map((j) => moment(i + j)));
  const target = degrees.map((i) => sum(near.map(([x, loss]) => loss * (x - lowest) ** i)));
  const [, c1, c2, c3] = solve(normal, target);
  const root = sqrt(c2 * c2 - 3 * c1 * c3);
  // where the derivative c1 + 2 c2 u + 3 c3 u^2 is 0 and rises, written without cancellation
  const u = c2 >= 0 ? -c1 / (c2 + root) : (root - c2) / (3 * c3);
  const bottom = lowest + u;
  return near[0][0] <= bottom && bottom <= near.at(-1)[0] ? bottom : NaN;
}

function meanValley(seeds, counts) {
  // The points [x, mean loss] at the learning rates that all seeds have. seeds: Maps x -> loss
  const common = [...seeds[0].keys()].filter((x) => seeds.every((losses) => losses.has(x)));
  const total = sum(counts);
  return unique(common).map((x) => {
    const losses = seeds.map((seed, i) => (counts[i] ? counts[i] * seed.get(x) : 0));
    return [x, sum(losses) / total];
  });
}

function minima(rows) {
  const cells = new Map();
  for (const row of rows) {
    const key = JSON.stringify([row.shape, row.T, row.batch]);
    if (!cells.has(key))
      cells.set(key, { shape: row.shape, T: row.T, batch: row.batch, beta: row.beta, bySeed: new Map() });
    const { bySeed } = cells.get(key);
    if (!bySeed.has(row.seed)) bySeed.set(row.seed, new Map());
    bySeed.get(row.seed).set(row.x, row.loss);
  }
  return [...cells.values()].map((cell) => {
    const seeds = [...cell.bySeed.values()];
    const points = meanValley(seeds, seeds.map(() => 1));
    const names = [...cell.bySeed.keys()];
    return { ...cell, seeds, names, points, x: vertex(points) };
  });
}

function leastSquares(cells, x, weight) {
  // log2 lr = log2 a(shape) + b log2 T + q log2 beta. Returns the mean log2 a, b and q, which
  // are NaN if T and beta vary together. log2 a is NaN if no cell of a shape has a weight.
  const shapes = [...new Set(cells.map((cell) => cell.shape))];
  const centered = (of) => {
    const values = cells.map((cell, i) => (weight[i] ? of(cell, i) : 0));
    const middle = new Map(shapes.map((shape) => {
      const here = cells.map((cell, i) => (cell.shape === shape ? weight[i] : 0));
      return [shape, sum(here.map((w, i) => w * values[i])) / sum(here)];
    }));
    return [values.map((v, i) => (weight[i] ? v - middle.get(cells[i].shape) : 0)), middle];
  };
  const [t, middleT] = centered((cell) => log2(cell.T));
  const [u, middleU] = centered((cell) => log2(cell.beta));
  const [y, middleY] = centered((_, i) => x[i]);
  const dot = (one, two) => sum(one.map((v, i) => weight[i] * v * two[i]));
  const det = dot(t, t) * dot(u, u) - dot(t, u) ** 2;
  if (!(det > 1e-9 * dot(t, t) * dot(u, u)) || !(det > 1e-12)) return { logA: NaN, b: NaN, q: NaN };
  const b = (dot(y, t) * dot(u, u) - dot(y, u) * dot(t, u)) / det;
  const q = (dot(y, u) * dot(t, t) - dot(y, t) * dot(t, u)) / det;
  const of = (s) => middleY.get(s) - b * middleT.get(s) - q * middleU.get(s);
  return { logA: mean(shapes.map(of)), b, q };
}

function inHalves(first, second, nothing) {
  // Both lists, one after the other, the shorter one filled up with nothing
  const half = max(first.length, second.length);
  return [first, second].flatMap((some) => [...some, ...Array(half - some.length).fill(nothing)]);
}

function fitLaw(rows) {
  // The law of the runs, and how it moves without one batch size of a shape (a column), and
  // without one seed, as fit.leave_out. laws[0] is the law itself.
  const found = minima(rows);
  const cells = found.filter((cell) => isFinite(cell.x));
  const columnOf = (cell) => JSON.stringify([cell.shape, cell.batch]);
  const ways = [cells.map(columnOf), cells.flatMap((cell) => cell.names)]
    .map((names) => [...new Set(names)]).map((names) => (names.length > 1 ? names : []));
  const everything = {};
  const laws = [everything, ...inHalves(...ways, everything)].map((out, k) => {
    const weight = [];
    const x = cells.map((cell) => {
      const gone = k > 0 && (out === everything || out === columnOf(cell));
      const counts = cell.names.map((seed) => (gone || seed === out ? 0 : 1));
      const bottom = gone ? NaN : vertexOf(cell, counts);
      weight.push(isFinite(bottom) ? sum(counts) : 0);
      return bottom;
    });
    return leastSquares(cells, x, weight);
  });
  return { found, cells, law: isFinite(laws[0].b) ? laws[0] : null, laws };
}

function vertexOf(cell, counts) {
  // The minimum of a cell if its seeds count so often
  return sum(counts) ? vertex(meanValley(cell.seeds, counts)) : NaN;
}

function errorOf(values) {
  // The standard error of values[0], and its degrees of freedom, as fit.error_of
  let variance = 0;
  let below = 0;
  const half = (values.length - 1) / 2;
  for (const some of [values.slice(1, 1 + half), values.slice(1 + half)]) {
    const answers = some.filter(isFinite);
    const n = answers.length;
    if (n < 2) continue;
    const middle = mean(answers);
    const part = ((n - 1) * sum(answers.map((value) => (value - middle) ** 2))) / n;
    variance += part;
    below += part ** 2 / (n - 1);
  }
  return [sqrt(variance), below > 0 ? variance ** 2 / below : 0];
}

function student(freedom) {
  // 95% of Student's t lie between minus this and plus this, as in fit.student
  const n = 4000;
  const step = Math.PI / 2 / n;
  const shares = [0];
  for (let i = 0; i < n; i++) shares.push(shares[i] + Math.cos(step * (i + 0.5)) ** (freedom - 1));
  const i = shares.findIndex((share) => share >= 0.95 * shares[n]);
  const part = (0.95 * shares[n] - shares[i - 1]) / (shares[i] - shares[i - 1]);
  return sqrt(freedom) * Math.tan(step * (i - 1 + part));
}

function intervalOf(values) {
  // [values[0] and its 95% interval], which is NaN if nothing varies. See fit.interval.
  const [error, freedom] = errorOf(values);
  const half = freedom > 0 ? error * student(freedom) : NaN;
  return [values[0], values[0] - half, values[0] + half];
}

const lawAt = (law, t, beta) => law.logA + law.b * t + law.q * log2(beta);
const bandAt = (fitted, t, beta) =>
  intervalOf(fitted.laws.map((law) => lawAt(law, t, beta))).slice(1);

// -- 3 The schedules, as in schedules.py -----------------------------------------------------

const powerLaw = (a, b, q, beta, ceiling) => (n) =>
  n > 0 ? min(ceiling, beta ** q * a * n ** b) : ceiling;
const exponential = (x) => (Math.exp(1 - x) - 1) / (Math.E - 1);
const halfCosine = (x) => 0.5 * (1 + Math.cos(Math.PI * x));
const cosine = (lr, warm, T, least) => (n) =>
  lr * (least + (1 - least) * halfCosine(clamp((n - warm) / (T - warm), 0, 1)));
const warmup = (schedule, warm) => (n) => (n < warm ? (schedule(warm) * n) / warm : schedule(n));
const decay = (schedule, T, length) => (n) =>
  n <= T - length
    ? schedule(n)
    : schedule(T - length) * exponential(min(1, (n - T + length) / length));

function powerOf(race, T) {  // without a T, the trunk
  const { a, b, q } = race.power;
  const trunk = warmup(powerLaw(a, b, q, race.beta, race.lr_max), race.warmup);
  return T ? decay(trunk, T, T / 10) : trunk;
}
const cosineOf = (race, run) =>
  warmup(cosine(run.lr, race.warmup, run.T, run.min_lr_ratio), race.warmup);

// -- 4 The state, which is also in the address, after # ----------------------------------------

const POLICIES = DATA.policies.map((policy) => policy.name);
const BATCHES = DATA.policies[0].batches.map((one) => one.batch);
const READINGS = {
  fixed: ["fixed batch size", "Bjorck et al."],
  best: ["best batch size", "Step Law"],
  three: ["three best batch sizes", "Power Scheduler"],
};
const CHOICES = {  // name: allowed values, of which the first is the start
  policy: [POLICIES[1], ...POLICIES],  // weight decay 0.1
  batch: [2, ...BATCHES],
  reading: [...Object.keys(READINGS), "drag"],
};
const NUMBERS = {  // name: [start, low, high, step]
  step: [1, 1, 4, 1],
  stop: [1, 0, 4, 1],
  guess: [-8.25, -10.6, -4.4, 0.05],
  shown: [0, 0, 1, 1],
  middle: [-7.4, -9, -5.5, 0.02],
  slope: [-0.75, -1, 0.5, 0.01],
  stop3: [0, 0, 3, 1],
  tokens: [22, 18.2, 43.2, 0.05],
  size: [3, 0, 13, 1],
};
const LISTS = { seen: POLICIES, asked: Object.keys(READINGS) };
const START = { seen: "", asked: "" };
for (const [name, values] of Object.entries(CHOICES)) START[name] = values[0];
for (const [name, [start]] of Object.entries(NUMBERS)) START[name] = start;
let state = { ...START };

// In the address, "weight decay 0.1" is 0.1. We also read the whole name.
const brief = (value) => String(value).replace(/^weight decay /, "");
const named = (values, text) => values.find((value) => brief(value) === brief(text));
const listed = (values, text) => values.filter((value) => text.split(",").some((one) => named([value], one)));

function read() {
  const found = new URLSearchParams(location.hash.slice(1));
  state = { ...START };
  for (const [name, text] of found) {
    if (!Object.hasOwn(START, name)) continue;
    if (name in CHOICES) state[name] = named(CHOICES[name], text) ?? START[name];
    if (name in LISTS) state[name] = listed(LISTS[name], text).join();
    if (name in NUMBERS) state[name] = allowed(name, text.trim() === "" ? NaN : Number(text));
  }
  rememberAnswer();
  render();
}

function rememberAnswer() {
  // A STOP beyond the question shows the answer for this weight decay. Only then do we say what a guess costs.
  if (state.stop > QUESTION) state.seen = remember("seen", state.policy);
  if (!isSeen(state.policy)) state.shown = 0;
}

function allowed(name, value) {
  const [start, low, high, step] = NUMBERS[name];
  if (!isFinite(value)) return start;
  return clamp(+(low + step * round((value - low) / step)).toFixed(3), low, high);
}

function write() {
  const changed = Object.entries(state).filter(([name, value]) => value !== START[name]);
  const pairs = changed.map(([name, value]) => [name, String(value).split(",").map(brief).join()]);
  history.replaceState(null, "", "#" + new URLSearchParams(pairs));
}

function change(values) {
  for (const [name, value] of Object.entries(values))
    state[name] = name in NUMBERS ? allowed(name, value) : value;
  rememberAnswer();
  render();
}

function remember(name, value) {
  const list = state[name] ? state[name].split(",") : [];
  return list.includes(value) ? state[name] : [...list, value].join();
}

// -- 5 Charts and controls -------------------------------------------------------------------

const frames = {};  // id -> the latest frame of a chart
let printing = false;

function frame(id, [x0, x1], [y0, y1], { left = 3.6, right = 1, bottom = 1.7, least = 10 } = {}) {
  // A frame turns t and x into pixels and back. Margins are in letters.
  const letter = parseFloat(getComputedStyle($(id)).fontSize);
  const w = printing ? 640 : $(id).clientWidth;
  const beside = w < 0.6 * document.querySelector("main").clientWidth;
  let share = 0.26;  // of the height of the window
  if (beside) share = innerHeight < 800 ? 0.39 : 0.45;
  if (innerHeight < 500) share = 0.6;
  const h = printing ? 300 : max(least * letter, min(share * innerHeight, 0.75 * w));
  const box = { x0: left * letter, x1: w - right * letter, y0: letter, y1: h - bottom * letter };
  const f = { id, w, h, letter, ...box };
  f.px = (t) => f.x0 + ((t - x0) / (x1 - x0)) * (f.x1 - f.x0);
  f.py = (y) => f.y1 - ((y - y0) / (y1 - y0)) * (f.y1 - f.y0);
  f.t = (pixel) => x0 + ((pixel - f.x0) / (f.x1 - f.x0)) * (x1 - x0);
  f.y = (pixel) => y0 + ((f.y1 - pixel) / (f.y1 - f.y0)) * (y1 - y0);
  f.inside = (y) => y >= y0 && y <= y1;
  frames[id] = f;
  return f;
}

const readable = (color) => `color-mix(in srgb, ${color} 65%, var(--ink))`;  // for text
const number = (pixel) => +pixel.toFixed(1);
const words = (x, y, text, { anchor = "middle", color = "var(--soft)", bold = false } = {}) =>
  `<text x="${number(x)}" y="${number(y)}" text-anchor="${anchor}" style="fill:${readable(color)};${
    bold ? "font-weight:700" : ""}">${text}</text>`;
const stroke = (color, width, dashes = "", opacity = 1) =>
  `style="stroke:${color}" stroke-width="${width}" stroke-dasharray="${dashes}" opacity="${opacity}"`;
const path = (points, look) =>
  points.length ? `<path d="M${points.map(([x, y]) => `${number(x)} ${number(y)}`).join("L")}" ${look}/>` : "";
const rule = (x1, y1, x2, y2, look = 'class="grid"') =>
  `<line x1="${number(x1)}" y1="${number(y1)}" x2="${number(x2)}" y2="${number(y2)}" ${look}/>`;
const dot = (x, y, r, fill, more = "") =>
  `<circle cx="${number(x)}" cy="${number(y)}" r="${r}" style="fill:${fill}" ${more}/>`;
const cross = (x, y, r, look) =>
  `<path d="M${number(x - r)} ${number(y - r)}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}" ${look}/>`;
const handle = (name, x, y, inside) =>
  `<g class="handle" data-drag="${name}">${dot(x, y, 22, "transparent")}${inside}</g>`;
const shade = (hue, share) =>  // from the light end of a hue to its dark end
  `color-mix(in srgb, var(--${hue}-low), var(--${hue}-high) ${round(100 * share)}%)`;

function axisX(f, ticks, label = size) {
  const wide = 4.2 * f.letter;
  let last = -Infinity;
  return ticks.map((tokens) => {
    const x = f.px(log2(tokens));
    const written = x - last >= wide ? words(x, f.h - 0.4 * f.letter, label(tokens)) : "";
    if (written) last = x;
    return rule(x, f.y0, x, f.y1) + written;
  }).join("");
}

function axisY(f, ticks, label = String) {
  return ticks.filter(([y]) => f.inside(y)).map(([y, value]) =>
    rule(f.x0, f.py(y), f.x1, f.py(y)) +
    words(f.x0 - 5, f.py(y) + 0.35 * f.letter, label(value), { anchor: "end" })).join("");
}

const RATE_TICKS = [1e-7, 1e-6, 1e-5, 1e-4, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1]
  .map((lr) => [log2(lr), lr]);
const tens = (ticks) => ticks.filter(([, lr]) => abs(Math.log10(lr) % 1) < 1e-9);
const plain = (lr) => (lr < 0.0001 ? lr.toExponential(0) : String(lr));

function draw(f, content) {
  $(f.id).innerHTML = `<svg height="${number(f.h)}" viewBox="0 0 ${f.w} ${number(f.h)}"
    aria-hidden="true">${content}</svg>`;
}

function apart(heights, gap, low, high) {
  // Move labels apart until no two overlap, within the frame.
  const order = heights.map((_, i) => i).sort((i, j) => heights[i] - heights[j]);
  const placed = [...heights];
  for (let round = 0; round < 60; round++) {
    for (let k = 1; k < order.length; k++) {
      const [up, down] = [order[k - 1], order[k]];
      const overlap = max(0, gap - (placed[down] - placed[up]));
      placed[up] -= overlap / 2;
      placed[down] += overlap / 2;
    }
    for (const i of order) placed[i] = clamp(placed[i], low, high);
  }
  return placed;
}

const dragged = {};  // name of a handle -> what to do at [t, y] of its chart

function listen(id, name) {
  // Drag a handle in a chart, or if none is hit, the handle of this name.
  const chart = $(id);
  let active = null;
  const move = (event) => {
    const box = chart.getBoundingClientRect();
    const f = frames[id];
    dragged[active](f.t(event.clientX - box.left), f.y(event.clientY - box.top), f);
  };
  chart.onpointerdown = (event) => {
    active = event.target.closest("[data-drag]")?.dataset.drag ?? name;
    if (!active || !dragged[active]) return;
    chart.setPointerCapture(event.pointerId);
    move(event);
  };
  chart.onpointermove = (event) => {
    if (active && chart.hasPointerCapture(event.pointerId)) move(event);
  };
  chart.onpointerup = chart.onpointercancel = () => {
    active = null;
    write();
  };
}

const refresh = [];  // what to do with every control when the state changes

function slider(where, name, label, say, act = (value) => change({ [name]: value })) {
  const [, low, high, step] = NUMBERS[name];
  $(where).insertAdjacentHTML("beforeend", `<div class="control"><label for="${name}">
    <span>${label}</span><output id="${name}-value"></output></label><input type="range" id="${name}"
    min="${low}" max="${high}" step="${step}"></div>`);
  $(name).oninput = () => act(+$(name).value);
  refresh.push(() => {
    $(name).value = state[name];
    $(name).ariaValueText = $(name + "-value").textContent = say();
  });
}

function buttons(where, items, pressed, act, color = () => "") {
  $(where).innerHTML = items.map(([key, label]) =>
    `<button type="button" value="${safe(key)}" style="--mark:${color(key)}">${label}</button>`).join("");
  for (const button of $(where).children) {
    button.onclick = () => act(button.value);
    refresh.push(() => (button.ariaPressed = String(pressed(button.value))));
  }
}

const signOf = ([, low, high]) => (high < 0 ? "falls" : low > 0 ? "rises" : "");

let saying;
function say(id, text) {
  // What a step says, and a moment later to a screen reader
  $(id).innerHTML = text;
  clearTimeout(saying);
  saying = setTimeout(() => {
    $("status").innerHTML = text.replaceAll("<sup>", "^");
  }, 500);
}

// -- 6 Step 1: you must stop somewhere --------------------------------------------------------

const LENGTHS = DATA.policies[0].batches[0].best.map((one) => one.T);
const QUESTION = LENGTHS.indexOf(LENGTHS.at(-1) / 4);  // the T from which to guess
const colorOfLength = (i) => shade("tokens", i / (LENGTHS.length - 1));
const colorOfPolicy = (name) =>
  shade("other", POLICIES.indexOf(name) / max(POLICIES.length - 1, 1));
const colorOfRate = (i) => [  // light, middle and dark
  "color-mix(in srgb, var(--wsd) 55%, var(--paper))",
  "var(--wsd)",
  "color-mix(in srgb, var(--wsd) 25%, var(--ink))",
][i];
const policyOf = (name) => DATA.policies.find((policy) => policy.name === name);
const batchOf = (name, batch) => policyOf(name).batches.find((one) => one.batch === batch);
const isSeen = (policy) => state.seen.split(",").includes(policy);  // was its answer shown?
const LAST = LENGTHS.length - 1;

function renderStop() {
  const here = batchOf(state.policy, state.batch);
  const stop = here.best[state.stop];
  const val = here.val_loss[state.stop];
  const winner = val.indexOf(min(...val));
  renderRates(here, winner);
  renderBest(here);

  // What it says
  const { law } = policyOf(state.policy);
  let text = `With ${safe(state.policy)}, <b>${short(here.rates[winner])}</b> ends lowest of these three at
    ${size(stop.T)} tokens. Of all learning rates, about <b>${rate(stop.x)}</b> is best. `;
  if (state.stop === LAST) {
    const sign = signOf(law.b);
    const trend = sign ? `The best learning rate ${sign} with T` : "We see neither a fall nor a rise with T";
    text += `<b>${trend}</b>: one slope for all ${BATCHES.length} batch sizes is ${exponent("T", law.b)}. `;
    if (state.policy === POLICIES[0]) text += "Weight decay did not help these small runs. ";
  }
  if (state.shown) {
    text += `Your guess of ${rate(state.guess)} costs ${costOf(here, state.guess)} nats, and the best learning rate of
      ${size(LENGTHS[QUESTION])} tokens would cost ${costOf(here, here.best[QUESTION].x)}.
      Below 0.005, we cannot tell.`;
  }
  say("said1", text);
  $("reveal").textContent = isSeen(state.policy) ? "Guess again" : "Show answer";
}

function costOf(here, x) {
  // The loss above that of the lowest run at the longest T, interpolated between the runs
  const [rates, losses] = [0, 1].map((i) => here.valley.map((point) => point[i]));
  const outside = x < rates[0] || x > rates.at(-1);
  return (outside ? "more than " : "about ") + nats(interpolate(x, rates, losses));
}

function hidden(f, text) {
  // The part of a chart that would show the answer, empty until the guess is made
  if (isSeen(state.policy)) return "";
  const x = f.px(log2(LENGTHS[QUESTION])) + 8;
  const box = `<rect x="${number(x)}" y="${number(f.y0)}" width="${number(f.x1 - x)}"
    height="${number(f.y1 - f.y0)}" style="fill:var(--tint)"/>`;
  return box + words((x + f.x1) / 2, f.y0 + 1.5 * f.letter, text);
}

function renderRates(here, winner) {
  // The losses of all policies at this batch size, so that a switch keeps the axes
  const same = DATA.policies.map((policy) => batchOf(policy.name, state.batch));
  const first = here.x.findIndex((x) => x > log2(200000));
  const trunks = same.flatMap((one) => one.trunks.map((losses) => losses.slice(first)));
  const heights = [...trunks, ...same.flatMap((one) => one.ends)].flat();
  const wide = $("rates").clientWidth > 420 || printing;  // is there room for the distances?
  const f = frame("rates", [here.x[first], log2(LENGTHS[LAST])], [min(...heights) - 0.06, max(...heights)],
    { left: 2.6, right: wide ? 10.8 : 7.6 });
  const steps = [...Array(20).keys()].map((i) => [1 + i / 5, (1 + i / 5).toFixed(1)]);
  let svg = axisX(f, LENGTHS) + axisY(f, steps) + hidden(f, "guess first");

  // The curves up to STOP, and a branch at every T on the way
  const t = log2(LENGTHS[state.stop]);
  const ends = [];
  here.trunks.forEach((losses, k) => {
    const color = colorOfRate(k);
    const point = (at) => [f.px(at), f.py(interpolate(at, here.x, losses))];
    const trunk = here.x.slice(first).filter((x) => x < t + log2(0.9)).map(point);
    svg += path([...trunk, point(t + log2(0.9))], stroke(color, 3.5));
    for (let i = 0; i <= state.stop; i++) {
      const T = log2(LENGTHS[i]);
      const end = [f.px(T), f.py(here.ends[i][k])];
      svg += path([point(T + log2(0.9)), end], stroke(color, i === state.stop ? 3.5 : 1.5));
      if (i === state.stop) ends.push(end[1]);
    }
  });

  // STOP
  const x = f.px(t);
  const color = colorOfLength(state.stop);
  const mark = rule(x, f.y0, x, f.y1, stroke(color, 2)) + dot(x, f.y0, 9, color);
  svg += handle("stop", x, f.y0, mark + words(x - 14, f.y0 + 0.4 * f.letter, "STOP",
    { anchor: "end", color, bold: true }));

  // A label beside every end
  const labels = apart(ends, 1.25 * f.letter, f.y0 + f.letter, f.y1 - 0.5 * f.letter);
  const losses = here.val_loss[state.stop];
  here.rates.forEach((lr, k) => {
    const above = losses[k] - losses[winner];
    const distance = `+${above < 0.0005 ? above.toFixed(4) : nats(above)}`;
    svg += path([[x, ends[k]], [x + 9, ends[k]], [x + 20, labels[k]]], stroke(colorOfRate(k), 1.5));
    if (k !== winner) svg += dot(x, ends[k], 3.5, colorOfRate(k));
    const more = k === winner ? (wide ? "lowest" : "✓") : wide ? distance : "";
    svg += words(x + 23, labels[k] + 0.35 * f.letter, `${short(lr)} ${more}`,
      { anchor: "start", color: colorOfRate(k), bold: true });
  });
  svg += dot(x, ends[winner], 6, colorOfRate(winner));
  draw(f, svg);
}

function renderBest(here) {
  const policies = DATA.policies.map((policy) => batchOf(policy.name, state.batch));
  const all = policies.flatMap((one) => one.best.flatMap((cell) => [cell.x, ...cell.seeds]));
  const low = min(...all, log2(here.rates[0])) - 0.4;
  const high = max(...all, log2(here.rates[2])) + 0.4;
  const f = frame("best", [log2(LENGTHS[0]) - 0.5, log2(LENGTHS[LAST])], [low, high], { left: 4.6, right: 6.5 });

  // The axis has the three learning rates, and those an octave or more beside them
  const octaves = [-4, -3, -2, -1, 1, 2, 3, 4].map((i) => here.rates[1] * 2 ** i);
  const free = octaves.filter((lr) => here.rates.every((one) => abs(log2(lr / one)) > 0.4));
  let svg = axisX(f, LENGTHS) + axisY(f, free.map((lr) => [log2(lr), lr]), short) + hidden(f, "");
  here.rates.forEach((lr, k) => {
    const y = f.py(log2(lr));
    svg += rule(f.x0, y, f.x1, y, stroke(colorOfRate(k), 2, "2 4"));
    svg += words(f.x0 - 5, y + 0.35 * f.letter, short(lr), { anchor: "end", color: colorOfRate(k), bold: true });
  });

  // The laws of this weight decay, and of those seen before
  const labels = [];  // beside the chart: {y, text, color, bold}
  const line = (name, width) => {
    const { law } = policyOf(name);
    const y = (T) => log2(law.a) + law.b[0] * log2(T) + law.q * log2(BETA(state.batch));
    const ends = [LENGTHS[0], LENGTHS[LAST]].map((T) => [f.px(log2(T)), f.py(y(T))]);
    svg += path(ends, stroke(colorOfPolicy(name), width, width > 2 ? "" : "6 4"));
    labels.push({ y: ends[1][1], text: name, color: colorOfPolicy(name), bold: name === state.policy });
  };
  for (const name of POLICIES) if (isSeen(name) && name !== state.policy) line(name, 2);
  if (state.stop === LAST) line(state.policy, 3);

  // STOP
  const stop = f.px(log2(LENGTHS[state.stop]));
  const ink = colorOfLength(state.stop);
  svg += handle("stop", stop, f.y0, rule(stop, f.y0, stop, f.y1, stroke(ink, 1)) + dot(stop, f.y0, 9, ink));

  // The minima so far, with their seeds
  here.best.slice(0, state.stop + 1).forEach(({ T, x, seeds }, i) => {
    const at = f.px(log2(T));
    const look = stroke(colorOfLength(i), 2);
    svg += rule(at, f.py(min(x, ...seeds)), at, f.py(max(x, ...seeds)), look);
    svg += dot(at, f.py(x), i === state.stop ? 8 : 6, colorOfLength(i));
  });

  // The guess
  const at = f.px(log2(LENGTHS[LAST]));
  if (state.shown) {
    const look = stroke("var(--ink)", 1.5, "3 3");
    svg += rule(at, f.py(state.guess), at, f.py(here.best[LAST].x), look);
  }
  if (state.shown || !isSeen(state.policy)) {
    const y = clamp(f.py(state.guess), f.y0, f.y1);
    const diamond = `<path d="M${number(at)} ${number(y - 9)}l9 9l-9 9l-9 -9z"
      style="fill:var(--paper);stroke:var(--ink)" stroke-width="2"/>`;
    svg += handle("guess", at, y, diamond);
    labels.push({ y, text: "your guess", color: "var(--soft)", bold: true });
  }

  const heights = apart(labels.map(({ y }) => y), 2.4 * f.letter, f.y0 + 0.5 * f.letter, f.y1 - f.letter);
  labels.forEach(({ text, ...look }, k) => {
    const [, first, second] = text.match(/(\S+) (.*)/);
    svg += words(at + 13, heights[k] - 0.2 * f.letter, safe(first), { anchor: "start", ...look });
    svg += words(at + 13, heights[k] + 0.9 * f.letter, safe(second), { anchor: "start", ...look });
  });
  draw(f, svg);
}

function setStop(stop) {
  // STOP waits at the question until the guess is made
  change({ stop: isSeen(state.policy) ? stop : min(stop, QUESTION) });
}

function setGuess(guess) {
  // A guess stays as it is once the answer is shown
  change(state.shown ? {} : { guess });
}

function chooseRuns(policy, batch) {
  // Ask again, if the answer was not yet shown. The guess starts at the last best that is shown.
  const seen = batch === state.batch ? state.seen : "";
  const stop = seen.split(",").includes(policy) ? state.stop : min(state.stop, QUESTION);
  change({ policy, batch, seen, stop, shown: 0, guess: batchOf(policy, batch).best[QUESTION].x });
}

function reveal() {
  if (isSeen(state.policy)) {
    const others = state.seen.split(",").filter((name) => name !== state.policy);
    change({ shown: 0, stop: QUESTION, seen: others.join() });
  } else change({ shown: 1, stop: LAST });
}

function setUpStop() {
  $("question").textContent = size(LENGTHS[QUESTION]);
  $("answer").textContent = size(LENGTHS[LAST]);
  slider("stop-bar", "stop", "<b>STOP</b>", () => `${size(LENGTHS[state.stop])} tokens`, setStop);
  slider("guess-bar", "guess", `Guess for ${size(LENGTHS[LAST])}`, () => rate(state.guess), setGuess);
  buttons("policies", POLICIES.map((name) => [name, safe(brief(name))]), (name) => name === state.policy,
    (policy) => chooseRuns(policy, state.batch), colorOfPolicy);
  buttons("batches", BATCHES.map((batch) => [batch, String(batch)]),
    (batch) => +batch === state.batch, (batch) => chooseRuns(state.policy, +batch),
    (batch) => shade("batch-size", log2(batch) / 7));
  $("reveal").onclick = reveal;
  const nearestLength = (t) => clamp(round(t - log2(LENGTHS[0])), 0, LAST);
  dragged.stop = (t) => setStop(nearestLength(t));
  dragged.guess = (_, y) => setGuess(y);
  listen("rates", "stop");
  listen("best", "stop");
}

// -- 7 Step 2: same points, three questions ----------------------------------------------------

const BETA = (batch, seqLen = DATA.questions.seq_len) => (batch * seqLen) / 4096;
const OURS = DATA.questions.cells.flatMap((cell) => cell.losses.flatMap((losses, seed) =>
  losses.map((loss, i) => ({ shape: cell.shape, T: cell.T, batch: cell.batch, seed,
    beta: BETA(cell.batch), x: log2(cell.lr[i]), loss: loss ?? Infinity }))));
const MINE = fitLaw(OURS);  // the law of our runs, fitted in the browser
const POINTS = MINE.cells.map((cell) => ({ t: log2(cell.T), T: cell.T, batch: cell.batch, x: cell.x,
  u: log2(cell.batch / 8), loss: min(...cell.points.map(([, loss]) => loss)), cell }));
const SIZES = unique(POINTS.map((point) => point.batch));
const TIMES = unique(POINTS.map((point) => point.T));
const CENTER = mean(TIMES.map(log2));
const colorOfBatch = (batch) => shade("batch-size", log2(batch) / log2(SIZES.at(-1)));
const FAR = 1e13;  // tokens
const FAR_RATES = [-23.5, -3];  // log2 of the learning rates in that figure

function chosen(reading) {
  // The points that a reading counts
  if (reading === "fixed") return POINTS;
  const count = reading === "best" ? 1 : 3;
  return TIMES.flatMap((T) => POINTS.filter((point) => point.T === T)
    .sort((one, two) => one.loss - two.loss).slice(0, count));
}

const LOOKS = {};  // reading -> {divide, slope, t, y}: how far we divide, and the line
for (const reading of Object.keys(READINGS)) {
  const divide = reading === "three" ? 1 : 0;
  const points = chosen(reading);
  LOOKS[reading] = { divide, slope: DATA.questions.readings[reading].ours[0],
    t: mean(points.map((point) => point.t)), y: mean(points.map((p) => p.x - divide * p.u)) };
}

let look = null;  // the look on the screen, which moves to that of the reading
let moving = 0;
function turnTo(target) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches || printing;
  if (!look || still) look = { ...target };
  const from = { ...look };
  const began = performance.now();
  cancelAnimationFrame(moving);
  const step = () => {
    const share = still ? 1 : clamp((performance.now() - began) / 600, 0, 1);
    const eased = share * share * (3 - 2 * share);
    for (const name in target) look[name] = from[name] + eased * (target[name] - from[name]);
    renderPoints();
    if (share < 1) moving = requestAnimationFrame(step);
  };
  step();
}

function renderQuestions() {
  const drag = state.reading === "drag";
  $("line-bars").hidden = !drag;
  if (drag) {
    cancelAnimationFrame(moving);
    renderLine();
    return;
  }
  const { ours, theirs } = DATA.questions.readings[state.reading];
  $("points-title").textContent = state.reading === "three"
    ? "Best learning rate / (batch size / 8) against T" : "Best learning rate against T";
  $("strip-title").textContent = "Exponent b: ours (dot, 95% interval), the paper's (cross)";
  turnTo(LOOKS[state.reading]);
  renderStrip();
  const questions = {
    fixed: "Keep the batch size fixed, with one slope for all of them",
    best: "At every T, keep only the batch size with the lowest loss",
    three: `At every T, keep the three batch sizes with the lowest losses, and divide the learning rate by the
      batch size, as if the two were proportional`,
  };
  const sign = signOf(ours);
  const verdict = sign ? `On average it ${sign} with T.` : "These runs cannot tell the sign.";
  const [, paper] = READINGS[state.reading];
  let text = `${questions[state.reading]}: ${exponent("T", ours)}. <b>${verdict}</b> ${paper} asked this, and
    found ${theirs}. `;
  const { overlap, order } = DATA.questions;
  if (remember("asked", state.reading).split(",").length === Object.keys(READINGS).length) {
    if (overlap) text += "All three intervals overlap, so these runs do not prove the order. ";
    const [above, below] = order.map((gap) => gap.toFixed(2));
    text += `But it is steady. Leave out any one batch size or either seed, and it stays: best batch size is at least
      ${above} above fixed, and three best at least ${below} below fixed.`;
  }
  say("said2", text);
}

function renderPoints() {
  const f = frame("points", [log2(TIMES[0]) - 0.2, log2(TIMES.at(-1))], [log2(0.0008), log2(0.034)],
    { right: 7 });
  let svg = axisX(f, TIMES) + axisY(f, RATE_TICKS);
  const lit = new Set(chosen(state.reading));
  const y = (point) => f.py(point.x - look.divide * point.u);
  const labels = [];
  for (const batch of SIZES) {
    const some = POINTS.filter((point) => point.batch === batch);
    svg += path(some.map((point) => [f.px(point.t), y(point)]), stroke(colorOfBatch(batch), 1.2, "", 0.6));
    labels.push([batch, y(some.at(-1))]);
    for (const point of some)
      svg += dot(f.px(point.t), y(point), lit.has(point) ? 6.5 : 3, colorOfBatch(batch),
        lit.has(point) ? `stroke="var(--ink)" stroke-width="${state.reading === "fixed" ? 0 : 2}"` : 'opacity="0.45"');
  }
  const at = (t) => [f.px(t), f.py(look.y + look.slope * (t - look.t))];
  svg += path([log2(TIMES[0]), log2(TIMES.at(-1))].map(at), stroke("var(--ink)", 4, "", 0.85));
  const gap = min(1.15 * f.letter, (f.y1 - f.y0) / (labels.length - 1));
  const heights = apart(labels.map(([, height]) => height), gap, f.y0, f.y1);
  labels.forEach(([batch, height], k) => {
    svg += path([[f.x1 + 8, height], [f.x1 + 18, heights[k]]], stroke(colorOfBatch(batch), 1));
    svg += words(f.x1 + 21, heights[k] + 0.35 * f.letter, (batch === SIZES.at(-1) ? "batch " : "") + batch,
      { anchor: "start", color: colorOfBatch(batch) });
  });
  draw(f, svg);
}

function renderStrip() {
  const f = frame("strip", [-1.4, 1.15], [0, 3.2], { left: 1, right: 1, least: 13 });
  let svg = "";
  for (const b of [-1, -0.5, 0, 0.5, 1])
    svg += rule(f.px(b), f.y0, f.px(b), f.y1) + words(f.px(b), f.h - 0.4 * f.letter, b);
  svg += rule(f.px(0), f.y0 - f.letter, f.px(0), f.y1, stroke("var(--soft)", 1.5));
  svg += words(f.px(0) - 6, f.y0 - 2, "falls with T", { anchor: "end" });
  svg += words(f.px(0) + 6, f.y0 - 2, "rises with T", { anchor: "start" });
  const asked = remember("asked", state.reading).split(",");
  Object.entries(READINGS).forEach(([key, [question, paper]], i) => {
    const { ours, theirs } = DATA.questions.readings[key];
    const row = (letters) => f.py(3 - i) + letters * f.letter;  // below its top
    const now = key === state.reading;
    const asks = key === "three" ? "three best / batch size" : question;
    svg += words(f.x0, row(0.9), f.w > 400 ? `${asks} · ${paper}` : paper,
      { anchor: "start", bold: now, color: now ? "var(--ink)" : "var(--soft)" });
    if (asked.includes(key)) {
      svg += rule(f.px(ours[1]), row(1.75), f.px(ours[2]), row(1.75), stroke("var(--wsd)", now ? 4 : 2));
      svg += dot(f.px(ours[0]), row(1.75), now ? 7 : 5, "var(--wsd)");
    }
    svg += cross(f.px(theirs), row(2.7), 5, stroke("var(--ink)", 2.5));
    svg += words(f.px(theirs) + 10, row(3.05), theirs, { anchor: "start", color: "var(--ink)" });
  });
  draw(f, svg);
}

// The cost of a line, log2 lr = middle + slope (t - CENTER) at batch size 8: the loss at its learning
// rate minus the lowest of the valley, as a mean over all valleys. The other batch sizes follow
// beta^q. Beyond the measured learning rates, a valley keeps the loss of its edge.
const GRID = [...Array(551).keys()].map((i) => -14 + i / 50);
const COSTS = TIMES.map((T) => {
  const here = POINTS.filter((point) => point.T === T);
  return GRID.map((x) => sum(here.map(({ cell, u, loss }) => {
    const finite = cell.points.filter(([, value]) => isFinite(value));
    return interpolate(x + MINE.law.q * u, finite.map(([at]) => at), finite.map(([, value]) => value)) - loss;
  })));
});

function cost(middle, slope) {
  const total = TIMES.map((T, i) => {
    const at = clamp((middle + slope * (log2(T) - CENTER) - GRID[0]) * 50, 0, GRID.length - 1.001);
    const k = Math.floor(at);
    return COSTS[i][k] + (at - k) * (COSTS[i][k + 1] - COSTS[i][k]);
  });
  return sum(total) / POINTS.length;
}

const LEVEL = 0.005;  // nats, as "level" in compare.py
const SLOPES = [...Array(151).keys()].map((i) => -1 + i / 100);
const MIDDLES = [...Array(176).keys()].map((i) => -9 + i / 50);
const TABLE = SLOPES.map((slope) => MIDDLES.map((middle) => cost(middle, slope)));
const LOWEST = min(...TABLE.map((row) => min(...row)));
const VALLEY = TABLE.map((row) => min(...row) - LOWEST);  // of every slope
const FLAT = SLOPES.filter((_, i) => VALLEY[i] <= LEVEL);
const EQUAL = SLOPES.flatMap((slope, i) => MIDDLES.map((middle, j) => [middle, slope, TABLE[i][j]]))
  .filter(([, , value]) => value <= LOWEST + LEVEL);  // lines that cost almost the same

function equalAt(t) {
  let low = Infinity;
  let high = -Infinity;
  for (const [middle, slope] of EQUAL) {
    low = min(low, middle + slope * (t - CENTER));
    high = max(high, middle + slope * (t - CENTER));
  }
  return [low, high];
}
const FLAT_RATES = TIMES.map((T, i) => {  // where a mean valley costs at most 0.01 nats
  const count = POINTS.filter((point) => point.T === T).length;
  const lowest = min(...COSTS[i]);
  const flat = GRID.filter((_, k) => (COSTS[i][k] - lowest) / count <= 0.01);
  return [flat[0], flat.at(-1)];
});

function renderLine() {
  const far = log2(FAR);
  const line = (t) => state.middle + state.slope * (t - CENTER);
  $("points-title").textContent = "Your line at batch size 8, and bars within 0.01 nats of the best";
  const f = frame("points", [log2(TIMES[0]) - 1, far], FAR_RATES, { left: 4, right: 1.5 });
  let svg = axisX(f, [1e6, 1e8, 1e10, 1e12]) + axisY(f, tens(RATE_TICKS), plain);
  const ts = [...Array(41).keys()].map((i) => log2(TIMES[0]) - 1 + (i / 40) * (far - log2(TIMES[0]) + 1));
  const band = ts.map((t) => [t, ...equalAt(t)]);
  const edge = [...band.map(([t, low]) => [t, low]), ...band.reverse().map(([t, , high]) => [t, high])];
  svg += path(edge.map(([t, y]) => [f.px(t), f.py(clamp(y, ...FAR_RATES))]),
    'style="fill:var(--wsd);fill-opacity:.2;stroke:none"');
  const [runs, end] = [TIMES[0] / 1.3, TIMES.at(-1) * 1.3].map((T) => f.px(log2(T)));
  svg += `<rect x="${number(runs)}" y="${number(f.y0)}" width="${number(end - runs)}"
    height="${number(f.y1 - f.y0)}" style="fill:var(--line);fill-opacity:.5"/>`;
  svg += words(runs, f.y1 - 0.5 * f.letter, "our runs", { anchor: "start", color: "var(--ink)" });
  TIMES.forEach((T, i) => {
    const [low, high] = FLAT_RATES[i];
    const at = f.px(log2(T));
    const look = `stroke-linecap="round" style="stroke:${shade("tokens", i / 3)}" stroke-width="6"`;
    svg += rule(at, f.py(low), at, f.py(high), look);
  });
  const inside = (t) => clamp(f.py(line(t)), f.y0, f.y1);
  svg += rule(f.px(log2(TIMES[0]) - 1), inside(log2(TIMES[0]) - 1), f.px(far), inside(far),
    stroke("var(--ink)", 3));
  const grip = (name, t) => handle(name, f.px(t), inside(t),
    dot(f.px(t), inside(t), 8, "var(--ink)", 'stroke="var(--paper)" stroke-width="2"'));
  svg += grip("middle", CENTER) + grip("end", far);
  draw(f, svg);
  renderCost();

  const [low, high] = equalAt(far);
  const mine = cost(state.middle, state.slope) - LOWEST;
  say("said2", `In our runs, your line, T<sup>${state.slope.toFixed(2)}</sup>, loses <b>${nats(mine)} nats</b> to the
    best line. Every slope from ${FLAT[0].toFixed(2)} to ${FLAT.at(-1).toFixed(2)} has a line that loses at most
    ${LEVEL}. The band holds all such lines, and at 10T tokens it spans a factor of
    <b>${short(2 ** (high - low))}</b>.`);
}

function renderCost() {
  const TOP = 0.03;
  $("strip-title").textContent = "Mean loss above the best line (nats) against the slope b";
  const f = frame("strip", [-1, 0.5], [0, 0.037], { left: 3 });  // with room for a name above TOP
  let svg = axisY(f, [0, 0.01, 0.02, 0.03].map((y) => [y, y]));
  for (const b of [-1, -0.5, 0, 0.5]) svg += words(f.px(b), f.h - 0.4 * f.letter, b);
  const x = f.px(FLAT[0]);
  svg += `<rect x="${number(x)}" y="${number(f.py(LEVEL))}" width="${number(f.px(FLAT.at(-1)) - x)}"
    height="${number(f.y1 - f.py(LEVEL))}" style="fill:var(--wsd);fill-opacity:.2"/>`;

  // The paper that asked for a line at a fixed batch size
  const { theirs } = DATA.questions.readings.fixed;
  const at = f.px(theirs);
  svg += rule(at, f.y0 + 0.6 * f.letter, at, f.y1, stroke("var(--soft)", 1, "2 4"));
  svg += cross(at, f.y1, 6, stroke("var(--ink)", 2.5));
  svg += words(at, f.y0 + 0.3 * f.letter, `${READINGS.fixed[1]} ${theirs}`, { color: "var(--ink)" });

  const curve = SLOPES.map((b, i) => [b, VALLEY[i]]).filter(([, value]) => value <= TOP);
  svg += path(curve.map(([b, value]) => [f.px(b), f.py(value)]), stroke("var(--wsd)", 2.5));
  svg += words(f.px(curve.at(-1)[0]), f.py(0.0225), "with the best middle", { anchor: "end", color: "var(--wsd)" });
  const mine = cost(state.middle, state.slope) - LOWEST;
  svg += dot(f.px(state.slope), f.py(min(mine, TOP)), 8, "var(--ink)");
  if (mine > TOP) {
    const left = state.slope > -0.3;
    svg += words(f.px(state.slope) + (left ? -13 : 13), f.py(TOP) + 0.35 * f.letter, `↑ ${nats(mine)}`,
      { anchor: left ? "end" : "start", bold: true, color: "var(--ink)" });
  }
  draw(f, svg);
}

function setUpQuestions() {
  const items = Object.entries(READINGS).map(([key, [question, paper]]) =>
    [key, `${question} <small>${paper}</small>`]);
  buttons("readings", [...items, ["drag", "drag the line"]], (key) => key === state.reading,
    (reading) => change({ reading, asked: reading === "drag" ? state.asked : remember("asked", reading) }),
    () => "var(--wsd)");
  slider("line-bars", "slope", "Slope b", () => state.slope.toFixed(2));
  slider("line-bars", "middle", "Middle", () => rate(state.middle));
  dragged.middle = (_, y) => change({ middle: y });
  dragged.end = (t, y) => change({ slope: (y - state.middle) / (log2(FAR) - CENTER) });
  listen("points");
  $("about2").innerHTML = `${DATA.questions.runs.toLocaleString("en")} runs of another sweep than in step 1: width 32,
    weight decay 0.1, sequences of ${safe(DATA.questions.seq_len)} tokens, two seeds. Brackets are 95% intervals.`;
}

// -- 8 Step 3: stop here, with three schedules -------------------------------------------------

const RACE = DATA.race;
const LAST_RUN = RACE.lengths.at(-1);
const FIRST = 200000;  // tokens, at which the figure begins

function renderRace() {
  const run = RACE.lengths[state.stop3];
  const { T } = run;
  const [power, planned, cut] = ["power", "planned", "cut"].map((name) => mean(run.losses[name]));
  const upTo = ([tokens, losses], end = T) =>
    tokens.map((n, i) => [n, losses[i]]).filter(([n]) => n <= end + 1 && n >= FIRST);
  const f = frame("losses", [log2(FIRST), log2(LAST_RUN.T)], [1.17, 2.1], { left: 2.6, right: 8.3 });
  const ticks = RACE.lengths.map((one) => one.T);
  let svg = axisX(f, ticks) + axisY(f, [1.2, 1.4, 1.6, 1.8, 2, 2.2, 2.4].map((y) => [y, y.toFixed(1)]));
  const curve = (points, color, width, dashes) =>
    (svg += path(points.map(([n, loss]) => [f.px(log2(n)), f.py(loss)]), stroke(color, width, dashes)));
  if (run !== LAST_RUN) curve([...upTo(LAST_RUN.planned), [T, cut]], "var(--cut)", 2, "2 3");
  curve(upTo(run.planned), "var(--cosine)", 2.5, "7 4");
  curve(upTo(RACE.trunk, 0.9 * T), "var(--power)", 2);
  for (const one of RACE.lengths.slice(0, state.stop3 + 1)) {
    const trunk = upTo(RACE.trunk, one.T * 0.9);
    curve([trunk.at(-1), ...upTo(one.branch, one.T)], "var(--power)", one === run ? 3.5 : 1.5);
  }
  const x = f.px(log2(T));
  const last = run === LAST_RUN;
  const ends = last ? [power, planned] : [power, planned, cut];
  const names = [["Power", "var(--power)"], ["planned", "var(--cosine)"], ["cut short", "var(--cut)"]];
  const heights = apart(ends.map((loss) => f.py(loss)), 1.2 * f.letter, f.y0, f.y1);
  ends.forEach((loss, k) => {
    svg += dot(x, f.py(loss), 5, names[k][1]);
    svg += words(x + 10, heights[k] + 0.35 * f.letter, `${loss.toFixed(2)} ${names[k][0]}`,
      { anchor: "start", color: names[k][1], bold: true });
  });
  const ink = "var(--ink)";
  svg += handle("stop3", x, f.y0, rule(x, f.y0, x, f.y1, stroke(ink, 1.5)) + dot(x, f.y0, 9, ink) +
    words(x - 14, f.y0 + 0.4 * f.letter, "STOP", { anchor: "end", color: ink, bold: true }));
  draw(f, svg);
  renderSchedules(run, last);

  const bySeed = run.losses.power.map((loss, seed) => loss - run.losses.planned[seed]);
  const signed = (value) => (value < 0 ? "-" : "+") + nats(abs(value));
  let text = `At ${size(T)} tokens, the planned cosine ends at ${nats(planned)} nats, and Power at ${nats(power)}. `;
  if (min(...bySeed) > 0) text += `<b>Power is above it in all ${RACE.seeds} seeds</b>`;
  else if (max(...bySeed) < 0) text += `<b>Power is below it in all ${RACE.seeds} seeds</b>`;
  else text += "<b>The seeds disagree on which is lower</b>";
  text += `, with differences from ${signed(min(...bySeed))} to ${signed(max(...bySeed))}. The planned cosine
    had to know this end from the start, and Power at nine tenths of it. `;
  text += last ? "The longest cosine is the planned one."
    : `The cosine for ${size(LAST_RUN.T)}, cut short here, is ${nats(cut - planned)} above the planned one. Its
      learning rate is still ${short(cosineOf(RACE, LAST_RUN)(T))}.`;
  say("said3", text);
}

function renderSchedules(run, last) {
  const f = frame("schedules", [0, LAST_RUN.T], [0, 1.05 * RACE.lengths[0].lr], { right: 6 });
  let svg = axisY(f, [0, 0.005, 0.01, 0.015, 0.02].map((y) => [y, y]));
  for (const one of RACE.lengths.slice(1))
    svg += words(f.px(one.T), f.h - 0.4 * f.letter, size(one.T));
  const curve = (schedule, from, to, color, width, dashes) => {
    const points = [...Array(161).keys()].map((i) => from + (i / 160) * (to - from));
    svg += path(points.map((n) => [f.px(n), f.py(schedule(n))]), stroke(color, width, dashes));
  };
  const { T } = run;
  const longest = cosineOf(RACE, LAST_RUN);
  if (!last) {
    curve(longest, T, LAST_RUN.T, "var(--cut)", 1, "2 5");
    curve(longest, 0, T, "var(--cut)", 2, "2 3");
    svg += dot(f.px(T), f.py(longest(T)), 5, "var(--cut)");
  }
  curve(cosineOf(RACE, run), 0, T, "var(--cosine)", 2.5, "7 4");
  curve(powerOf(RACE), T * 0.9, LAST_RUN.T * 0.9, "var(--power)", 1, "2 5");
  curve(powerOf(RACE, T), 0, T, "var(--power)", 3);
  const x = f.px(T);
  svg += handle("stop3", x, f.y0, rule(x, f.y0, x, f.y1, stroke("var(--ink)", 1.5)));
  draw(f, svg);
}

function setUpRace() {
  slider("stop3-bar", "stop3", "<b>STOP</b>", () => `${size(RACE.lengths[state.stop3].T)} tokens`);
  const index = (T) => {
    const gaps = RACE.lengths.map((run) => abs(log2(run.T) - log2(max(T, 1))));
    return gaps.indexOf(min(...gaps));
  };
  dragged.stop3 = (t, _, f) => change({ stop3: index(f.id === "losses" ? 2 ** t : t) });
  listen("losses", "stop3");
  listen("schedules", "stop3");
  $("about3").innerHTML = `Means of ${RACE.seeds} seeds at width ${safe(RACE.width)} and batch size
    ${safe(RACE.batch)}. <b style="color:var(--power)">Power</b> is one run with a decay at every STOP,
    <b style="color:var(--cosine)">planned</b> one cosine for every STOP, and
    <b style="color:var(--cut)">cut short</b> the longest cosine, stopped early. The peak of the cosine was tuned
    at ${size(LAST_RUN.T)} and is higher for shorter runs. <b>Any schedule with a late decay can stop like Power</b>,
    also one that holds its learning rate. The README compares them.`;
}

// -- 9 Step 4: your run ------------------------------------------------------------------------

let data = { rows: OURS, fitted: MINE, seqLen: DATA.questions.seq_len, ours: true, note: "" };

function csv(text) {
  // Rows of a CSV with a header. A quoted field may hold commas.
  const [header = "", ...lines] = text.split(/\r?\n/).filter((line) => line.trim());
  const fields = (line) => [...line.matchAll(/("(?:[^"]|"")*"|[^,]*)(?:,|$)/g)]
    .slice(0, line.split(",").length).map(([, field]) => field.replace(/^"|"$/g, "").trim());
  const names = fields(header);
  return lines.map((line) => Object.fromEntries(fields(line).map((value, i) =>
    [names[i], value !== "" && isFinite(value) ? +value : value])));
}

function parse(text) {
  // Rows as in fit.law: lr, total_tokens, val_loss, batch_size or batch_tokens. Throws an Error.
  const isJson = text.trimStart().startsWith("{");
  const records = isJson
    ? text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line)) : csv(text);
  if (!records.length) throw Error("it has no runs");
  const fixed = ["schedule", "weight_decay", "warmup_tokens", "fingerprint", "n_layer"];
  for (const name of fixed)
    if (new Set(records.map((record) => record[name]).filter((value) => value !== undefined)).size > 1)
      throw Error(`these runs differ in ${name}; fit them separately`);
  return records.map((record, i) => {
    const seqLen = Number(record.seq_len ?? 4096);
    const batch = Number(record.batch_size ?? record.batch_tokens / seqLen);
    const [T, lr] = [Number(record.total_tokens), Number(record.lr)];
    for (const [name, value] of Object.entries({ total_tokens: T, lr, batch_size: batch }))
      if (!(value > 0 && isFinite(value))) throw Error(`run ${i + 1} has no ${name}`);
    const loss = record.val_loss;
    const diverged = record.diverged === true || record.diverged === "True" || !isFinite(loss ?? "x") || loss === "";
    const shape = record.shape ?? (record.n_embd ? `width ${record.n_embd}` : "one shape");
    return { shape: String(shape), T, batch, beta: (batch * seqLen) / 4096, seqLen,
      seed: String(record.seed ?? 0), x: log2(lr), loss: diverged ? Infinity : Number(loss) };
  });
}

function load(name, text) {
  try {
    const rows = parse(text);
    const fitted = fitLaw(rows);
    if (!fitted.law) throw Error(`${fitted.cells.length} of ${fitted.found.length} valleys have a bottom;
      a law needs two run lengths and two batch sizes`);
    data = { rows, fitted, seqLen: rows[0].seqLen, ours: false, note: "" };
    data.note = `${name}: ${rows.length.toLocaleString("en")} runs`;
  } catch (error) {
    data.note = `${name}: ${error.message}`;
  }
  render();
}

function nearestBatch() {
  const sizes = unique(data.fitted.found.map((cell) => cell.batch));
  const gaps = sizes.map((batch) => abs(log2(batch) - state.size));
  return sizes[gaps.indexOf(min(...gaps))];
}

function commandFor(lr) {
  return `python train.py --schedule wsd --lr ${lr} --total_tokens ${tokensOf(state.tokens)} ` +
    `--batch_size ${2 ** state.size}`;
}
const tokensOf = (t) => +(2 ** t).toPrecision(3);

function renderRun() {
  const { fitted } = data;
  const T = tokensOf(state.tokens);
  const t = log2(T);
  const beta = BETA(2 ** state.size, data.seqLen);
  const x = lawAt(fitted.law, t, beta);
  const [low, high] = bandAt(fitted, t, beta);
  const times = unique(fitted.cells.map((cell) => cell.T));
  const sizes = unique(fitted.cells.map((cell) => cell.batch));
  const outside = T > times.at(-1) || T < times[0] || 2 ** state.size > sizes.at(-1) || 2 ** state.size < sizes[0];
  renderLaw(t, x, beta, times);
  renderValleys();

  const [b, q] = ["b", "q"].map((name) => intervalOf(fitted.laws.map((law) => law[name])));
  const left = fitted.found.length - fitted.cells.length;
  let text = `The law of ${data.ours ? "our small runs" : "your runs"} says <b>${rate(x)}</b>
    [${rate(low)}, ${rate(high)}] for ${size(T)} tokens at batch size
    ${2 ** state.size} (sequences of ${data.seqLen} tokens). `;
  text += outside ? "<b>This is beyond the runs</b>, and the 95% interval holds only if the law stays straight. "
    : "The brackets are a 95% interval.";
  say("said4", text);
  $("hold").hidden = outside;  // no command beyond the runs
  $("command").textContent = commandFor(rate(x));
  $("about4").innerHTML = `${data.note ? `<b>${safe(data.note)}.</b> ` : ""}Learning rate ∝ ${exponent("T", b)} ·
    ${exponent("beta", q)}, with beta the batch size in sequences of 4096 tokens, fitted to ${fitted.cells.length} valleys
    by the rule of fit.py (${left} left out). ${data.ours ? "These are our runs of step 2. " : ""}A file needs lr,
    total_tokens, batch_size and val_loss, may have seed, seq_len and shape, and stays on your machine.`;
}

function renderLaw(t, x, beta, times) {
  const { fitted } = data;
  const from = min(log2(times[0]), t) - 0.5;
  const to = max(log2(times.at(-1)), t) + 0.5;
  const all = [from, to].flatMap((at) => [lawAt(fitted.law, at, beta), ...bandAt(fitted, at, beta)]);
  const middle = mean([min(...all), max(...all)]);
  const half = max(1.5, (max(...all) - min(...all)) / 2 + 0.5);
  const batch = nearestBatch();
  const moved = batch !== 2 ** state.size;  // then the dots are hollow
  $("law-title").textContent = `Best learning rate against T at batch size ${2 ** state.size}` +
    (moved ? `, dots moved by the law from ${short(batch, 4)}` : "");
  const f = frame("law", [from, to], [middle - half, middle + half], { left: 4.2 });
  const wide = to - from > 9;
  const ticks = [1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13].filter((n) => log2(n) > from && log2(n) < to);
  let svg = axisX(f, wide ? ticks : times) + axisY(f, half > 4 ? tens(RATE_TICKS) : RATE_TICKS, plain);
  const ts = [...Array(21).keys()].map((i) => from + (i / 20) * (to - from));
  const band = ts.map((at) => [at, ...bandAt(fitted, at, beta)]);
  const edge = [...band.map(([at, low]) => [at, low]), ...band.reverse().map(([at, , high]) => [at, high])];
  svg += path(edge.map(([at, y]) => [f.px(at), f.py(y)]), 'style="fill:var(--wsd);fill-opacity:.2;stroke:none"');
  svg += path([from, to].map((at) => [f.px(at), f.py(lawAt(fitted.law, at, beta))]), stroke("var(--wsd)", 2.5));
  for (const cell of fitted.cells.filter((one) => one.batch === batch)) {
    const y = cell.x + fitted.law.q * log2(beta / cell.beta);
    const color = shade("tokens", times.indexOf(cell.T) / max(times.length - 1, 1));
    if (f.inside(y)) svg += dot(f.px(log2(cell.T)), f.py(y), 5, moved ? "var(--paper)" : color,
      `stroke="${color}" stroke-width="2"`);
  }
  const right = f.px(t) > f.w * 0.6;
  svg += rule(f.px(t), f.y0, f.px(t), f.y1, stroke("var(--ink)", 1, "3 3")) + dot(f.px(t), f.py(x), 8, "var(--ink)");
  svg += words(f.px(t) + (right ? -13 : 13), f.py(x) - 0.8 * f.letter, rate(x),
    { anchor: right ? "end" : "start", bold: true, color: "var(--ink)" });
  draw(f, svg);
}

function renderValleys() {
  const batch = nearestBatch();
  const { fitted } = data;
  const shapes = [...new Set(fitted.found.map((cell) => cell.shape))];
  const some = fitted.found.filter((cell) => cell.batch === batch && cell.shape === shapes[Math.floor(shapes.length / 2)])
    .map((cell) => ({ ...cell, points: cell.points.filter(([, loss]) => isFinite(loss)) }))
    .filter((cell) => cell.points.length).sort((one, two) => one.T - two.T);
  $("valleys-title").textContent =
    `Valleys at batch size ${short(batch, 4)}: loss above the lowest, against learning rate`;
  const xs = some.flatMap((cell) => cell.points.map(([x]) => x));
  const f = frame("valleys", [min(...xs) - 0.2, max(...xs) + 0.2], [0, 0.2], { left: 2.8, right: 4 });
  let svg = axisY(f, [0, 0.05, 0.1, 0.15, 0.2].map((y) => [y, y]));
  let last = -Infinity;
  for (const [x, lr] of RATE_TICKS) {
    const at = f.px(x);
    if (at < f.x0 || at > f.x1) continue;
    svg += rule(at, f.y0, at, f.y1);
    if (at - last > 4 * f.letter) svg += words((last = at), f.h - 0.4 * f.letter, plain(lr));
  }
  some.forEach((cell, i) => {
    const color = shade("tokens", i / max(some.length - 1, 1));
    const lowest = min(...cell.points.map(([, loss]) => loss));
    const shown = cell.points.filter(([, loss]) => loss - lowest <= 0.2);
    svg += path(shown.map(([x, loss]) => [f.px(x), f.py(loss - lowest)]), stroke(color, 2));
    for (const [x, loss] of shown) svg += dot(f.px(x), f.py(loss - lowest), 2.5, color);
    if (isFinite(cell.x)) svg += rule(f.px(cell.x), f.y1, f.px(cell.x), f.y1 - 14, stroke(color, 3));
    if (i < 12) svg += words(f.x1 + 6, f.y0 + (0.8 + 1.15 * i) * f.letter, size(cell.T), { anchor: "start", color });
  });
  draw(f, svg);
}

function setUpRun() {
  slider("tokens-bar", "tokens", "Tokens T", () => size(tokensOf(state.tokens)));
  slider("size-bar", "size", "Batch size", () => String(2 ** state.size));
  $("copy").onclick = () => copy($("command").textContent, "Command");
  $("file").onchange = async () => {
    const [file] = $("file").files;
    if (file) load(file.name, await file.text());
  };
  $("ours").onclick = () => {
    data = { rows: OURS, fitted: MINE, seqLen: DATA.questions.seq_len, ours: true, note: "" };
    $("file").value = "";
    render();
  };
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", async (event) => {
    event.preventDefault();
    const [file] = event.dataTransfer.files;
    if (!file) return;
    state.step = 4;
    load(file.name, await file.text());
  });
}

// -- 10 All together ---------------------------------------------------------------------------

const STEPS = [
  [1, "Stop", renderStop],
  [2, "Three questions", renderQuestions],
  [3, "Three runs", renderRace],
  [4, "Your run", renderRun],
];

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // without permission, as on some pages from a disk
    const area = document.body.appendChild(document.createElement("textarea"));
    area.value = text;
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $("status").textContent = `${what} copied`;
}

function render() {
  for (const [step, , renderStep] of STEPS) {
    $(`step${step}`).hidden = step !== state.step;
    if (step === state.step || printing) renderStep();
  }
  for (const update of refresh) update();
}

$("steps").innerHTML = STEPS.map(([step, name], i) =>
  `<button type="button" value="${step}" aria-label="${i + 1} ${name}">${i + 1}
    <span>${name}</span></button>`).join(" ");
for (const button of $("steps").children) {
  button.onclick = () => change({ step: +button.value });
  refresh.push(() => (button.ariaCurrent = +button.value === state.step ? "step" : null));
}
$("share").onclick = async () => {
  write();
  await copy(location.href, "Address");
  $("share").textContent = "Address copied";
  setTimeout(() => ($("share").textContent = "Share"), 1500);
};
setUpStop();
setUpQuestions();
setUpRace();
setUpRun();
for (const type of ["change", "click"]) addEventListener(type, write);
addEventListener("hashchange", read);
addEventListener("resize", () => render());
addEventListener("beforeprint", () => render((printing = true)));
addEventListener("afterprint", () => render((printing = false)));
read();
