"use strict";
// The page to drag. Its parts: 1 small tools, 2 the state, which is also in the address,
// 3 charts and controls, 4 to 6 the three steps, and 7 what connects them. page.py has made all
// losses, so nothing is fitted here. x always is log2 of a learning rate, but in step 2.

// -- 1 Small tools -------------------------------------------------------------------------

const { log2, min, max, abs, round } = Math;
const $ = (id) => document.getElementById(id);
const mean = (values) => values.reduce((total, value) => total + value, 0) / values.length;
const clamp = (value, low, high) => min(max(value, low), high);
const short = (value, digits = 2) => String(+value.toPrecision(digits));
const rate = (x) => (2 ** x).toPrecision(2);
const nats = (value) => value.toFixed(3);

function size(tokens) {
  for (const [unit, letter] of [[1e6, "M"], [1e3, "k"]])
    if (tokens >= 0.9995 * unit) return short(tokens / unit, 3) + letter;
  return short(tokens, 3);
}

function interpolate(at, x, y) {
  const right = x.findIndex((value) => value >= at);
  const i = right < 0 ? x.length - 1 : max(right, 1);
  const share = clamp((at - x[i - 1]) / (x[i] - x[i - 1]), 0, 1);
  return y[i - 1] + share * (y[i] - y[i - 1]);
}

// -- 2 The state, which is also in the address ------------------------------------------------
//
// So a link opens a view: #step=2&end=800 stops the runs at 800,000 tokens, and
// #step=3&stop=2&batch=8 asks for the best learning rate at batch size 8.

const LINES = DATA.pilot.lines;
for (const line of LINES) {
  // The learning rates from which to choose, which runs of both lengths tried
  const ends = (i) => line.valleys.map((valley) => valley.x.at(i));
  [line.low, line.high] = [max(...ends(0)), min(...ends(-1))];
  line.id = line.name.toLowerCase();
}

const POLICIES = DATA.policies.map((policy) => policy.name);
const BATCHES = DATA.policies[0].batches.map((one) => one.batch);
const CHOICES = {  // name: allowed values, of which the first is the start
  policy: [POLICIES[1], ...POLICIES],  // weight decay 0.1
  batch: BATCHES,
  worst: ["", ...LINES.map((line) => line.name)],  // the guess of step 1
};
const NUMBERS = {  // name: [start, low, high, step]
  step: [1, 1, 3, 1],
  long: [0, 0, 1, 1],  // does step 1 show the long runs?
  end: [800, 400, 3200, 40],  // the T at which step 2 stops, in thousands of tokens
  stop: [1, 0, 4, 1],  // the T at which step 3 stops
  guess: [-8.25, -10.6, -4.4, 0.05],
  shown: [0, 0, 1, 1],  // do we say what the guess costs?
};
for (const { id, low, high } of LINES) NUMBERS[id] = [high, low, high, 0.1];
const START = { seen: "" };  // seen: the policies whose answer was shown
for (const [name, values] of Object.entries(CHOICES)) START[name] = values[0];
for (const [name, [start]] of Object.entries(NUMBERS)) START[name] = start;
let state = { ...START };

// In the address, "weight decay 0.1" is 0.1.
const brief = (value) => String(value).replace(/^weight decay /, "");
const match = (values, text) => values.find((value) => brief(value) === brief(text));
const isSeen = (policy) => state.seen.split(",").includes(policy);

function read() {
  state = { ...START };
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (Object.hasOwn(CHOICES, name)) state[name] = match(CHOICES[name], text) ?? START[name];
    if (Object.hasOwn(NUMBERS, name)) state[name] = allowed(name, parseFloat(text));
    if (name === "seen")
      state.seen = POLICIES.filter((policy) => text.split(",").includes(brief(policy))).join();
  }
  change({});
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
    state[name] = Object.hasOwn(NUMBERS, name) ? allowed(name, value) : value;
  // A STOP beyond the question shows the answer for this weight decay.
  if (state.stop > QUESTION && !isSeen(state.policy))
    state.seen = state.seen ? `${state.seen},${state.policy}` : state.policy;
  if (!isSeen(state.policy)) state.shown = 0;
  render();
}

// -- 3 Charts and controls -------------------------------------------------------------------

const frames = {};  // id -> the latest frame of a chart

function frame(id, [x0, x1], [y0, y1], { left, right, low = false }) {
  // A frame turns values into pixels and back. Margins are in letters. low: less high beside
  // other charts
  const letter = parseFloat(getComputedStyle($(id)).fontSize);
  const w = $(id).clientWidth;
  const beside = w < 0.6 * document.querySelector("main").clientWidth;
  let share = 0.26;  // of the height of the window
  if (beside) share = innerHeight < 800 ? 0.39 : 0.45;
  if (innerHeight < 500) share = 0.6;
  if (beside && low) share *= 0.75;
  const h = max(10 * letter, min(share * innerHeight, 0.75 * w));
  const box = { x0: left * letter, x1: w - right * letter, y0: letter, y1: h - 1.7 * letter };
  const f = { id, w, h, letter, ...box };
  f.px = (x) => f.x0 + ((x - x0) / (x1 - x0)) * (f.x1 - f.x0);
  f.py = (y) => f.y1 - ((y - y0) / (y1 - y0)) * (f.y1 - f.y0);
  f.x = (pixel) => x0 + ((pixel - f.x0) / (f.x1 - f.x0)) * (x1 - x0);
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
const stroke = (color, width, dashes = "") =>
  `style="stroke:${color}" stroke-width="${width}" stroke-dasharray="${dashes}"`;
const path = (points, look) =>
  `<path d="M${points.map(([x, y]) => `${number(x)} ${number(y)}`).join("L")}" ${look}/>`;
const rule = (x1, y1, x2, y2, look = 'class="grid"') =>
  `<line x1="${number(x1)}" y1="${number(y1)}" x2="${number(x2)}" y2="${number(y2)}" ${look}/>`;
const dot = (x, y, r, fill) =>
  `<circle cx="${number(x)}" cy="${number(y)}" r="${r}" style="fill:${fill}"/>`;
const handle = (name, x, y, inside) =>
  `<g class="handle" data-drag="${name}">${dot(x, y, 22, "transparent")}${inside}</g>`;
const shade = (hue, share) =>  // from the light end of a hue to its dark end
  `color-mix(in srgb, var(--${hue}-low), var(--${hue}-high) ${round(100 * share)}%)`;

function axisX(f, ticks) {
  let last = -Infinity;
  return ticks.map((tokens) => {
    const x = f.px(log2(tokens));
    const line = rule(x, f.y0, x, f.y1);
    if (x - last < 4.2 * f.letter) return line;  // no room for a label
    last = x;
    return line + words(x, f.h - 0.4 * f.letter, size(tokens));
  }).join("");
}

function axisY(f, ticks) {  // ticks: [height, label]
  return ticks.filter(([y]) => f.inside(y)).map(([y, label]) =>
    rule(f.x0, f.py(y), f.x1, f.py(y)) +
    words(f.x0 - 5, f.py(y) + 0.35 * f.letter, label, { anchor: "end" })).join("");
}

const LOSS_TICKS = [...Array(20).keys()].map((i) => [1 + i / 5, (1 + i / 5).toFixed(1)]);

function stopMark(f, name, x, color, text = "STOP") {
  const mark = rule(x, f.y0, x, f.y1, stroke(color, 2)) + dot(x, f.y0, 9, color);
  const label = words(x - 14, f.y0 + 0.4 * f.letter, text, { anchor: "end", color, bold: true });
  return handle(name, x, f.y0, mark + label);
}

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

const dragged = {};  // name of a handle -> what to do at [x, y] of its chart

function listen(id, name) {
  // Drag a handle in a chart, or if none is hit, the handle of this name.
  const chart = $(id);
  let active = null;
  const move = (event) => {
    const box = chart.getBoundingClientRect();
    const f = frames[id];
    dragged[active](f.x(event.clientX - box.left), f.y(event.clientY - box.top), id);
  };
  chart.onpointerdown = (event) => {
    active = event.target.closest("[data-drag]")?.dataset.drag ?? name;
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

function slider(where, name, label, say, act) {
  const [, low, high, step] = NUMBERS[name];
  $(where).innerHTML = `<label for="${name}"><span>${label}</span>
    <output id="${name}-value"></output></label>
    <input type="range" id="${name}" min="${low}" max="${high}" step="${step}">`;
  $(name).oninput = () => act(+$(name).value);
  refresh.push(() => {
    $(name).value = state[name];
    $(name).ariaValueText = $(name + "-value").textContent = say();
  });
}

function buttons(where, items, pressed, act, color) {
  $(where).innerHTML = items.map(([key, label]) =>
    `<button type="button" value="${key}" style="--mark:${color(key)}">${label}</button>`).join("");
  for (const button of $(where).children) {
    button.onclick = () => act(button.value);
    refresh.push(() => (button.ariaPressed = String(pressed(button.value))));
  }
}

let saying;
function say(id, text) {
  // What a step says, and a moment later to a screen reader
  $(id).innerHTML = text;
  clearTimeout(saying);
  saying = setTimeout(() => ($("status").innerHTML = text.replaceAll("<sup>", "^")), 500);
}

// -- 4 Step 1: tuned in a short run, run 16 times as long -------------------------------------

const [SHORT, LONG] = DATA.pilot.lengths;
const STUDENT_T = 4.303;  // 95% of Student's t with three seeds is within this
const NEAR = 0.01;  // nats that we cannot tell from 0
const ABOVE = [-0.02, 0.125];  // nats above the lowest bottom, which the valleys show
const LOWEST = min(...LINES.map((line) => line.low));
const HIGHEST = max(...LINES.map((line) => line.high));

// Losses [seeds] of a schedule; which: 0 in the short runs, 1 in the long ones
function lossesAt(line, which, x) {
  const valley = line.valleys[which];
  return valley.curves.map((losses) => interpolate(x, valley.x, losses));
}
const atChosen = (line, which) => lossesAt(line, which, state[line.id]);
const atBottom = (line, which) => lossesAt(line, which, line.valleys[which].bottom);
const minus = (values, others) => values.map((value, i) => value - others[i]);
const costs = (line, which) => minus(atChosen(line, which), atBottom(line, which));

function lowestLine(which) {
  const bottoms = LINES.map((line) => mean(atBottom(line, which)));
  return LINES[bottoms.indexOf(min(...bottoms))];
}

function interval(values) {
  // The ends of the 95% interval of a mean over the seeds
  const center = mean(values);
  const squares = values.map((value) => (value - center) ** 2);
  const half = STUDENT_T * Math.sqrt(mean(squares) / (values.length - 1));
  return [center - half, center + half];
}

function withInterval(values, text = nats) {
  const ends = interval(values).map(text).join(", ");
  return `${text(mean(values))} <span class="together">[${ends}]</span>`;
}

function renderPilot() {
  const which = state.long;
  const lowest = lowestLine(which);
  LINES.forEach(renderValley);
  const rows = LINES.map((line) => {
    const losses = atChosen(line, which);
    const above = [costs(line, which), minus(losses, atBottom(lowest, which))];
    const cells = [nats(mean(losses)), ...above.map((values) => withInterval(values))];
    const color = readable(LOOKS[line.name][0]);
    return `<tr><th scope="row" style="color:${color}">${line.name}</th>
      ${cells.map((cell) => `<td>${cell}</td>`).join("")}</tr>`;
  });
  const heads = ["loss", "above its bottom", `above the lowest (${lowest.name})`];
  $("ends").innerHTML = `<caption>At ${size(DATA.pilot.lengths[which])} tokens</caption>
    <tr><td></td>${heads.map((head) => `<th scope="col">${head}</th>`).join("")}</tr>
    ${rows.join("")}`;
  $("run").textContent = which ? `Back to ${size(SHORT)}` : "Run 16 times as long";
  say("said1", which ? verdict() : advice());
}

const listed = (texts) => texts.join(", ") || "none";
const named = (lines) => listed(lines.map((line) => `<b>${line.name}</b>`));

function advice() {
  const far = LINES.filter((line) => mean(costs(line, 0)) >= NEAR);
  return far.length ? `Not within ${NEAR} nats of the bottom: ${named(far)}.` :
    `All are within ${NEAR} nats of the bottom. Guess, and run.`;
}

function verdict() {
  // 1. The numbers that were chosen
  const above = LINES.map((line) => mean(costs(line, 1)));
  const farthest = LINES[above.indexOf(max(...above))].name;
  let guessed = "";
  if (state.worst) guessed = state.worst === farthest ? ", as you guessed" : `, not ${state.worst}`;
  const good = LINES.filter((_, i) => above[i] < NEAR);
  let text = `<b>${farthest}</b> is farthest from its bottom${guessed}. Within ${NEAR} nats:
    ${named(good)}. `;

  // 2. The bottoms, as factors with intervals
  const found = { moved: [], undecided: [] };
  for (const { name, valleys } of LINES) {
    const octaves = minus(valleys[1].bottoms, valleys[0].bottoms);
    const [low, high] = interval(octaves);
    const factor = withInterval(octaves, (x) => (2 ** x).toFixed(2));
    found[low > 0 || high < 0 ? "moved" : "undecided"].push(`<b>${name}</b> × ${factor}`);
  }
  text += `Bottoms moved: ${listed(found.moved)}; undecided: ${listed(found.undecided)}. `;

  // 3. One schedule against another
  const [wsd, power, linear] = LINES.map((line) => atChosen(line, 1));
  return text + `Minus Power: WSD <b>${withInterval(minus(wsd, power))}</b>, and linear, which knew T,
    ${withInterval(minus(linear, power))}.`;
}

function renderValley(line) {
  const id = `valley-${line.id}`;
  const f = frame(id, [LOWEST, HIGHEST], ABOVE, { left: 2.8, right: 1, low: true });
  const color = LOOKS[line.name][0];
  let svg = axisY(f, [0, 0.05, 0.1].map((y) => [y, y]));
  for (const lr of [0.004, 0.008, 0.016, 0.032]) {
    const x = f.px(log2(lr));
    svg += rule(x, f.y0, x, f.y1) + words(x, f.h - 0.4 * f.letter, lr);
  }

  // The valley of the short runs, dashed as soon as there is one of the long runs
  for (let which = 0; which <= state.long; which++) {
    const valley = line.valleys[which];
    const lowest = mean(atBottom(lowestLine(which), which));
    const point = ([x, loss]) => [f.px(x), f.py(loss - lowest)];
    const seen = ([x, y]) => x > f.x0 - 1 && x < f.x1 + 1 && y >= f.y0 && y <= f.y1;
    const losses = valley.x.map((_, i) => mean(valley.curves.map((curve) => curve[i])));
    const curve = valley.x.map((x, i) => point([x, losses[i]])).filter(seen);
    const past = which < state.long;
    svg += path(curve, past ? stroke(color, 1.5, "4 4") : stroke(color, 3));
    const dots = past ? [] : valley.points.map(point).filter(seen);
    svg += dots.map(([x, y]) => dot(x, y, 3, color)).join("");
    const [x, y] = which ? curve.at(-1) : curve[0];
    const [right, up] = which ? [-0.3, 0.6] : [0.6, -0.8];  // letters
    svg += words(x + right * f.letter, y - up * f.letter, size(DATA.pilot.lengths[which]),
      { anchor: which ? "end" : "start", color, bold: !past });
  }

  // How far the bottom moved
  if (state.long) {
    const [from, to] = line.valleys.map((valley) => f.px(valley.bottom));
    const y = f.y1 - 0.4 * f.letter;
    const tip = to < from ? 6 : -6;
    svg += rule(from, y, to, y, stroke(color, 3));
    svg += path([[to + tip, y - 5], [to, y], [to + tip, y + 5]], stroke(color, 3));
  }

  // The chosen learning rate
  const lowest = mean(atBottom(lowestLine(state.long), state.long));
  const x = f.px(state[line.id]);
  const y = clamp(f.py(mean(atChosen(line, state.long)) - lowest), f.y0, f.y1);
  const left = x > (f.x0 + f.x1) / 2;
  const look = { anchor: left ? "end" : "start", color: "var(--ink)", bold: true };
  const mark = rule(x, f.y0, x, f.y1, stroke("var(--ink)", 1.5)) + dot(x, y, 7, "var(--ink)") +
    words(x + (left ? -11 : 11), y - 0.9 * f.letter, `+${nats(mean(costs(line, state.long)))}`, look);
  draw(f, svg + handle(line.id, x, y, mark));
}

function setUpPilot() {
  for (const id of ["short", "at"]) $(id).textContent = size(SHORT);
  $("long").textContent = size(LONG);
  $("power-b").textContent = RACE.b;
  $("valleys").innerHTML = LINES.map(({ id }) => `<figure>
    <div class="bar control" id="${id}-bar"></div>
    <div class="chart" id="valley-${id}"></div></figure>`).join("");
  for (const { name, id } of LINES) {
    const choose = (x) => change({ [id]: x });
    const label = `<b style="--mark:${LOOKS[name][0]} solid">${name}</b>`;
    slider(`${id}-bar`, id, label, () => rate(state[id]), choose);
    dragged[id] = choose;
    listen(`valley-${id}`, id);
  }
  buttons("worst", LINES.map(({ name }) => [name, name]), (name) => name === state.worst,
    (worst) => change({ worst }), (name) => LOOKS[name][0]);
  $("run").onclick = () => change({ long: 1 - state.long });
}

// -- 5 Step 2: when will the run stop? --------------------------------------------------------

const RACE = DATA.race;
const LONGEST = RACE.lengths.at(-1);
const FIRST = 200000;  // tokens, at which the losses begin
const LOOKS = {
  Power: ["var(--power)", 3, ""],
  WSD: ["var(--wsd)", 3, "7 4"],
  cosine: ["var(--cosine)", 2.5, "7 4"],
  linear: ["var(--linear)", 2, ""],
  cut: ["var(--cut)", 2, "2 3"],
};

// The schedules of schedules.py, from n, the tokens seen, to a learning rate
const warmup = (schedule) => (n) =>
  n < RACE.warmup ? schedule(RACE.warmup) * n / RACE.warmup : schedule(n);
const STABLE = {
  Power: warmup((n) => min(RACE.lr_max, RACE.beta ** RACE.q * RACE.a * n ** RACE.b)),
  WSD: warmup(() => RACE.wsd_lr),
};
const PLANNED = {  // finished share of the run, without its warmup -> share of the peak
  cosine: (done) => 0.55 + 0.45 * Math.cos(Math.PI * done),
  linear: (done) => 1 - done,
};

function decay(stable, T, share) {
  const start = (1 - share) * T;
  const remaining = (n) => (Math.exp((T - n) / (T - start)) - 1) / (Math.E - 1);
  return (n) => n <= start ? stable(n) : stable(start) * remaining(n);
}

function planned(name, T) {
  const peak = name === "linear" ? RACE.linear_peak : RACE.peak * (T / LONGEST.T) ** RACE.b;
  return warmup((n) => peak * PLANNED[name]((n - RACE.warmup) / (T - RACE.warmup)));
}

function renderRace() {
  const T = 1000 * state.end;
  const start = (1 - RACE.share) * T;
  const run = RACE.lengths.find((one) => one.T === T);  // none for most T
  const cut = interpolate(T, ...LONGEST.cosine);
  renderStable(T, start);
  renderPlanned(T);
  renderLosses(T, run, cut);

  let text = `Cosine and linear had to know ${size(T)} at their first step, Power and WSD only at
    <b>${size(start)}</b>. `;
  if (run) {
    const above = run.losses.cosine - run.losses.Power;
    text += `Power ends at ${nats(run.losses.Power)} nats, the cosine ${nats(abs(above))}
      ${above < 0 ? "below" : "above"}. `;
  } else {
    text += `No run of ours ends here. `;
  }
  if (run === LONGEST) text += "Here both cosines are the same run.";
  else {
    const lr = planned("cosine", LONGEST.T)(T);
    const where = run ? `ends ${nats(cut - run.losses.cosine)} above the planned one` :
      `ends at ${nats(cut)}`;
    text += `Cut short, the cosine for ${size(LONGEST.T)} ${where}, its learning rate still
      ${short(lr)}.`;
  }
  say("said2", text);
}

function rateFrame(id) {
  const highest = RACE.peak * (RACE.lengths[0].T / LONGEST.T) ** RACE.b;
  return frame(id, [0, LONGEST.T], [0, 1.05 * highest], { left: 3.6, right: 1.6 });
}

function rateAxes(f) {
  const lengths = RACE.lengths.slice(1).map((one) => one.T);
  const tokens = lengths.map((T) => words(f.px(T), f.h - 0.4 * f.letter, size(T)));
  return axisY(f, [0, 0.005, 0.01, 0.015].map((lr) => [lr, lr])) + tokens.join("");
}

function rateCurve(f, schedule, [from, to], look) {
  const [left, right] = [f.px(from), f.px(to)];
  const count = round(right - left) + 1;  // a point at every pixel
  const x = [...Array(count + 1).keys()].map((i) => left + (i / count) * (right - left));
  return path(x.map((pixel) => [pixel, f.py(schedule(f.x(pixel)))]), stroke(...look));
}

function renderStable(T, start) {
  const f = rateFrame("stable");
  const shaded = f.px(start) - f.x0;
  let svg = `<rect x="${number(f.x0)}" y="${number(f.y0)}" width="${number(shaded)}"
    height="${number(f.y1 - f.y0)}" style="fill:var(--shade)"/>` + rateAxes(f);
  for (const [name, stable] of Object.entries(STABLE)) {
    const [color, ...look] = LOOKS[name];
    svg += rateCurve(f, stable, [start, LONGEST.T], [color, 1, "2 5"]);
    svg += rateCurve(f, decay(stable, T, RACE.share), [0, T], [color, ...look]);
  }
  svg += rule(f.px(start), f.y0, f.px(start), f.y1, stroke("var(--soft)", 1));
  draw(f, svg + stopMark(f, "end", f.px(T), "var(--ink)", ""));
}

function renderPlanned(T) {
  const f = rateFrame("planned");
  const long = planned("cosine", LONGEST.T);
  let svg = rateAxes(f);
  if (T < LONGEST.T) {
    svg += rateCurve(f, long, [T, LONGEST.T], [LOOKS.cut[0], 1, "2 5"]);
    svg += rateCurve(f, long, [0, T], LOOKS.cut) + dot(f.px(T), f.py(long(T)), 5, LOOKS.cut[0]);
  }
  for (const name of Object.keys(PLANNED))
    svg += rateCurve(f, planned(name, T), [0, T], LOOKS[name]);
  draw(f, svg + stopMark(f, "end", f.px(T), "var(--ink)", ""));
}

function renderLosses(T, run, cut) {
  // Only what was measured: without a decay that ends here, the run that continues
  const f = frame("losses", [log2(FIRST), log2(LONGEST.T)], [1.17, 2.1], { left: 2.6, right: 8.3 });
  let svg = axisX(f, RACE.lengths.map((one) => one.T)) + axisY(f, LOSS_TICKS);
  const upTo = (end, [tokens, losses]) => {
    const seen = tokens.map((n, i) => [n, losses[i]]).filter(([n]) => FIRST <= n && n < end);
    return [...seen, [end, interpolate(end, tokens, losses)]];
  };
  const curve = (points, ...look) => {
    svg += path(points.map(([n, loss]) => [f.px(log2(n)), f.py(loss)]), stroke(...look));
  };
  const ends = [];
  if (T < LONGEST.T) {
    curve(upTo(T, LONGEST.cosine), ...LOOKS.cut);
    ends.push(["cut short", "var(--cut)", cut]);
  }
  if (run) {
    curve(upTo(T, run.cosine), ...LOOKS.cosine);
    ends.push(["cosine", "var(--cosine)", run.losses.cosine]);
  }
  const [last, name] = run ? [(1 - RACE.share) * T, "Power"] : [T, "no decay"];
  const trunk = upTo(last, RACE.trunk);
  curve(trunk, "var(--power)", 2);
  for (const one of RACE.lengths.filter((some) => some.T <= T)) {
    const begin = upTo((1 - RACE.share) * one.T, RACE.trunk).at(-1);
    const width = one === run ? 3.5 : 1.5;
    curve([begin, ...upTo(one.T, one.power)], "var(--power)", width);
  }
  ends.push([name, "var(--power)", run ? run.losses.Power : trunk.at(-1)[1]]);

  const x = f.px(log2(T));
  svg += stopMark(f, "end", x, "var(--ink)");
  const heights = apart(ends.map(([, , loss]) => f.py(loss)), 1.2 * f.letter, f.y0, f.y1);
  ends.forEach(([label, color, loss], k) => {
    svg += dot(x, f.py(loss), 5, color);
    svg += words(x + 10, heights[k] + 0.35 * f.letter, `${loss.toFixed(3)} ${label}`,
      { anchor: "start", color, bold: true });
  });
  draw(f, svg);
}

function setUpRace() {
  slider("end-bar", "end", "<b>STOP</b>", () => `${size(1000 * state.end)} tokens`,
    (end) => change({ end }));
  dragged.end = (x, _, id) => change({ end: (id === "losses" ? 2 ** x : x) / 1000 });
  for (const id of ["stable", "planned", "losses"]) listen(id, "end");
  $("about2").textContent = `Width ${RACE.width}, means of ${RACE.seeds} seeds. Curves: a part of the
    text, raised.`;
}

// -- 6 Step 3: which learning rate is best? --------------------------------------------------

const LENGTHS = DATA.policies[0].batches[0].best.map((one) => one.T);
const LAST = LENGTHS.length - 1;
const QUESTION = LENGTHS.indexOf(LENGTHS[LAST] / 4);  // the T from which to guess
const policyOf = (name) => DATA.policies.find((policy) => policy.name === name);
const batchOf = (name, batch) => policyOf(name).batches.find((one) => one.batch === batch);
const colorOfLength = (i) => shade("tokens", i / LAST);
const colorOfPolicy = (name) => shade("other", POLICIES.indexOf(name) / (POLICIES.length - 1));
const colorOfRate = (i) => [  // light, middle and dark
  "color-mix(in srgb, var(--wsd) 70%, var(--paper))",
  "var(--wsd)",
  "color-mix(in srgb, var(--wsd) 25%, var(--ink))",
][i];

function renderStop() {
  const here = batchOf(state.policy, state.batch);
  const losses = here.val_loss[state.stop];
  const winner = losses.indexOf(min(...losses));
  renderRates(here, winner);
  renderBest(here);

  const stop = here.best[state.stop];
  let text = `<b>${short(here.rates[winner])}</b> ends lowest of these three at ${size(stop.T)}
    tokens. Of all, about <b>${rate(stop.x)}</b> is best. `;
  if (state.stop === LAST) {
    const [b, low, high] = policyOf(state.policy).b;
    let trend = "We see neither a fall nor a rise with T";
    if (high < 0) trend = "The best learning rate falls with T";
    if (low > 0) trend = "The best learning rate rises with T";
    text += `<b>${trend}</b>, at all batch sizes as <span class="together">T<sup>${b.toFixed(2)}</sup>
      [${low.toFixed(2)}, ${high.toFixed(2)}]</span>. `;
  }
  if (state.shown) {
    text += `Your guess of ${rate(state.guess)} costs ${costOf(here, state.guess)} nats, and keeping
      the best of ${size(LENGTHS[QUESTION])} would cost ${costOf(here, here.best[QUESTION].x)}.
      Below 0.01, we cannot tell.`;
  }
  say("said3", text);
  $("reveal").textContent = isSeen(state.policy) ? "Guess again" : "Show answer";
}

function costOf(here, x) {
  // The loss above that of the best learning rate at the longest T, interpolated between runs
  const [rates, losses] = [0, 1].map((i) => here.valley.map((point) => point[i]));
  const outside = x < rates[0] || x > rates.at(-1);
  const cost = interpolate(x, rates, losses) - interpolate(here.best[LAST].x, rates, losses);
  return (outside ? "more than " : "about ") + nats(max(0, cost));
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
  const same = POLICIES.map((name) => batchOf(name, state.batch));
  const first = here.x.findIndex((x) => x > log2(200000));
  const trunks = same.flatMap((one) => one.trunks.map((losses) => losses.slice(first)));
  const heights = [...trunks, ...same.flatMap((one) => one.ends)].flat();
  const limits = [min(...heights) - 0.06, max(...heights)];
  const margins = { left: 2.6, right: 10.8 };
  const f = frame("rates", [here.x[first], log2(LENGTHS[LAST])], limits, margins);
  let svg = axisX(f, LENGTHS) + axisY(f, LOSS_TICKS) + hidden(f, "guess first");

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
  const x = f.px(t);
  svg += stopMark(f, "stop", x, colorOfLength(state.stop));

  // A label beside every end
  const labels = apart(ends, 1.25 * f.letter, f.y0 + f.letter, f.y1 - 0.5 * f.letter);
  const losses = here.val_loss[state.stop];
  here.rates.forEach((lr, k) => {
    const color = colorOfRate(k);
    const above = losses[k] - losses[winner];
    const distance = `+${above < 0.0005 ? above.toFixed(4) : nats(above)}`;
    const more = k === winner ? "lowest" : distance;
    svg += path([[x, ends[k]], [x + 9, ends[k]], [x + 20, labels[k]]], stroke(color, 1.5));
    svg += dot(x, ends[k], k === winner ? 6 : 3.5, color);
    svg += words(x + 23, labels[k] + 0.35 * f.letter, `${short(lr)} ${more}`,
      { anchor: "start", color, bold: true });
  });
  draw(f, svg);
}

function renderBest(here) {
  const same = POLICIES.map((name) => batchOf(name, state.batch));
  const all = same.flatMap((one) => one.best.flatMap((cell) => [cell.x, ...cell.seeds]));
  const low = min(...all, log2(here.rates[0])) - 0.4;
  const high = max(...all, log2(here.rates[2])) + 0.4;
  const [first, last] = [LENGTHS[0], LENGTHS[LAST]].map(log2);
  const f = frame("best", [first - 0.5, last], [low, high], { left: 4.6, right: 6.5 });

  // The axis has the three learning rates, and those an octave or more beside them
  const octaves = [-4, -3, -2, -1, 1, 2, 3, 4].map((i) => here.rates[1] * 2 ** i);
  const free = octaves.filter((lr) => here.rates.every((one) => abs(log2(lr / one)) > 0.4));
  const ticks = free.map((lr) => [log2(lr), short(lr)]);
  let svg = axisX(f, LENGTHS) + axisY(f, ticks) + hidden(f, "");
  here.rates.forEach((lr, k) => {
    const y = f.py(log2(lr));
    svg += rule(f.x0, y, f.x1, y, stroke(colorOfRate(k), 2, "2 4"));
    svg += words(f.x0 - 5, y + 0.35 * f.letter, short(lr),
      { anchor: "end", color: colorOfRate(k), bold: true });
  });

  // The laws of this weight decay, and of those seen before
  const labels = [];  // beside the chart: {y, text, color, bold}
  for (const name of POLICIES) {
    const current = name === state.policy;
    if (current ? state.stop < LAST : !isSeen(name)) continue;
    const color = colorOfPolicy(name);
    const ends = batchOf(name, state.batch).line.map(f.py);
    svg += path([[f.px(first), ends[0]], [f.px(last), ends[1]]],
      stroke(color, current ? 3 : 2, current ? "" : "6 4"));
    labels.push({ y: ends[1], text: name, color, bold: current });
  }
  svg += stopMark(f, "stop", f.px(log2(LENGTHS[state.stop])), colorOfLength(state.stop), "");

  // The minima so far, with their seeds
  here.best.slice(0, state.stop + 1).forEach(({ T, x, seeds }, i) => {
    const at = f.px(log2(T));
    const look = stroke(colorOfLength(i), 2);
    svg += rule(at, f.py(min(x, ...seeds)), at, f.py(max(x, ...seeds)), look);
    svg += dot(at, f.py(x), i === state.stop ? 8 : 6, colorOfLength(i));
  });

  // The guess
  const at = f.px(last);
  const y = clamp(f.py(state.guess), f.y0, f.y1);
  const answer = f.py(here.best[LAST].x);
  if (state.shown) svg += rule(at, y, at, answer, stroke("var(--ink)", 1.5, "3 3"));
  if (state.shown || !isSeen(state.policy)) {
    const diamond = `<path d="M${number(at)} ${number(y - 9)}l9 9l-9 9l-9 -9z"
      style="fill:var(--paper);stroke:var(--ink)" stroke-width="2"/>`;
    svg += handle("guess", at, y, diamond);
    labels.push({ y, text: "your guess", color: "var(--soft)", bold: true });
  }

  const [top, bottom] = [f.y0 + 0.5 * f.letter, f.y1 - f.letter];
  const heights = apart(labels.map((label) => label.y), 2.4 * f.letter, top, bottom);
  labels.forEach(({ text, color, bold }, k) => {
    const [, one, two] = text.match(/(\S+) (.*)/);
    const look = { anchor: "start", color, bold };
    svg += words(at + 13, heights[k] - 0.2 * f.letter, one, look);
    svg += words(at + 13, heights[k] + 0.9 * f.letter, two, look);
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
  } else {
    state.seen = state.seen ? `${state.seen},${state.policy}` : state.policy;
    change({ shown: 1, stop: LAST });
  }
}

function setUpStop() {
  $("question").textContent = size(LENGTHS[QUESTION]);
  $("answer").textContent = size(LENGTHS[LAST]);
  slider("stop-bar", "stop", "<b>STOP</b>", () => `${size(LENGTHS[state.stop])} tokens`, setStop);
  const label = `Guess for ${size(LENGTHS[LAST])}`;
  slider("guess-bar", "guess", label, () => rate(state.guess), setGuess);
  buttons("policies", POLICIES.map((name) => [name, brief(name)]), (name) => name === state.policy,
    (policy) => chooseRuns(policy, state.batch), colorOfPolicy);
  buttons("batches", BATCHES.map((batch) => [batch, batch]), (batch) => +batch === state.batch,
    (batch) => chooseRuns(state.policy, +batch), (batch) => shade("batch-size", log2(batch) / 7));
  $("reveal").onclick = reveal;
  dragged.stop = (t) => setStop(t - log2(LENGTHS[0]));
  dragged.guess = (_, x) => setGuess(x);
  listen("rates", "stop");
  listen("best", "stop");
}

// -- 7 All together ---------------------------------------------------------------------------

const STEPS = [
  ["Run long", renderPilot],
  ["Stop", renderRace],
  ["Best learning rate", renderStop],
];

function render() {
  STEPS.forEach(([, renderStep], i) => {
    $(`step${i + 1}`).hidden = state.step !== i + 1;
    if (state.step === i + 1) renderStep();
  });
  $("schedules").hidden = state.step === 3;
  for (const update of refresh) update();
}

$("steps").innerHTML = STEPS.map(([name], i) =>
  `<button type="button" value="${i + 1}">${i + 1} ${name}</button>`).join(" ");
for (const button of $("steps").children) {
  button.onclick = () => change({ step: +button.value });
  refresh.push(() => (button.ariaCurrent = +button.value === state.step ? "step" : null));
}
setUpPilot();
setUpRace();
setUpStop();
for (const type of ["change", "click"]) addEventListener(type, write);
addEventListener("hashchange", read);
addEventListener("resize", render);
read();
