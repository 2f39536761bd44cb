"use strict";

// Runs are followed through server-sent events, or are all in the element `data` of a page in one file.
// Text of runs only ever becomes text nodes.

const COLOURS = 8;
const AXES = { version: "step", minutes: "minutes", rollouts: "rollouts" };
const LOAD_AXIS = "minutes since the start";  // slots are in use before training, too
const CHARTS = [
  { title: "Reward", lines: [["reward_mean", "training"], ["reward_read_mean", "all read"]], smooth: 5, heldOut: true, large: true },
  { title: "Lag of trained tokens, in steps", lines: [["lag_mean", "mean"], ["lag_max", "max"]], zero: true },
  { title: "Rollouts that cross weight versions", lines: [["crossing_fraction", "share"]], share: true },
  { title: "Effective sample size", lines: [["ess", "1 is on-policy: now"]], share: true, low: 0.5 },  // LOW_ESS of metrics/statistics.py
  { title: "Slots in use", lines: [["in_progress", "in use"], ["queued", "queued"]], load: true, zero: true },
  { title: "Tokens per second", lines: [["engine/tokens_per_s", "generated"], ["trained_per_s", "trained on, with gradient"]], smooth: 5, zero: true },
  { title: "Completion length", lines: [["completion_length_mean", "trained on"], ["sampled_length_mean", "sampled"]], zero: true },
  { title: "Seconds per step", lines: [["train_s", "training"], ["wait_s", "waiting"]], smooth: 5, zero: true },
  { title: "Entropy", lines: [["entropy_mean", "nats"]] },
  { title: "Gradient norm", lines: [["grad_norm", "norm"]], zero: true },
];
const OWN_CHARTS = new Set(["version", "minutes", "rollouts", "time_s", ...CHARTS.flatMap((one) => one.lines.map(([name]) => name))]);
const MOST_OTHERS = 60;
const WHOLE = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7].flatMap((unit) => [unit, 2 * unit, 5 * unit]);  // between ticks of steps

const $ = (selector) => document.querySelector(selector);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (i) => css(`--c${i % COLOURS}`);
const whole = document.getElementById("data") ? JSON.parse(document.getElementById("data").textContent) : null;

let chosen = [];       // labels of the runs that are shown
let focused = null;    // the run whose stages, evaluations and rollouts are shown
let listed = [];
let axis = "version";
let held = false;
let source = null;
const runs = new Map();
const tints = new Map();  // label -> number of a colour, for runs that share one
const colourOf = (label) => tints.get(label) ?? chosen.indexOf(label);

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

const replacedBy = new WeakMap();

function fill(parent, data, make) {  // only when `data` has changed, so that what is selected stays selected
  const now = JSON.stringify(data);
  if (replacedBy.get(parent) === now) return;
  replacedBy.set(parent, now);
  parent.replaceChildren(...make());
}

function table(header, rows, strong = []) {
  const cells = (tag, texts) => texts.map((text) => el(tag, tag === "th" ? { scope: "col" } : {}, text));
  const head = header.some((text) => text) ? el("thead", {}, el("tr", {}, ...cells("th", header))) : null;
  const body = rows.map((row) => el("tr", strong.includes(row[0]) ? { class: "strong" } : {}, ...cells("td", row)));
  return el("div", { class: "scroll", tabindex: "0" }, el("table", {}, head, el("tbody", {}, ...body)));
}

// ---- numbers as text

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

function short(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (Number.isInteger(value)) return String(value);
  return size >= 1e-3 || size === 0 ? String(+value.toPrecision(3)) : value.toExponential(1);
}

const reward = (value) => (known(value) ? value.toFixed(3) : "–");

function duration(seconds) {
  if (!known(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const pad = (number) => String(number).padStart(2, "0");
  if (whole < 60) return `${whole}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}:${pad(whole % 60)}`;
  return `${Math.floor(whole / 3600)}:${pad(Math.floor(whole / 60) % 60)}:${pad(whole % 60)}`;
}

// ---- the data of a run

function newRun() {
  return { now: null, steps: { columns: {}, points: 0 }, load: { columns: {}, points: 0 }, evaluations: [], groups: null, settings: {},
    result: [], gain: [] };
}

function extend(table, part) {
  for (const column of Object.values(table.columns)) column.length = Math.min(column.length, part.start);
  for (const [name, values] of Object.entries(part.columns)) {
    const column = (table.columns[name] ??= []);
    while (column.length < part.start) column.push(null);
    for (const value of values) column.push(value);
  }
  table.points = part.points;
  for (const column of Object.values(table.columns)) while (column.length < part.points) column.push(null);
}

function take(message) {
  for (const [label, part] of Object.entries(message)) {
    if (!runs.has(label)) runs.set(label, newRun());
    const run = runs.get(label);
    run.now = part.now;
    if (part.steps) extend(run.steps, part.steps);
    if (part.load) extend(run.load, part.load);
    if (part.evaluations) run.evaluations = part.evaluations;
    if (part.settings) run.settings = part.settings;
    if (part.groups) run.groups = part.groups;
    if (part.result) run.result = part.result;
    if (part.gain) run.gain = part.gain;
  }
  draw();
}

function connect() {
  if (whole) { draw(); return; }
  if (source) source.close();
  runs.clear();
  if (!chosen.length) { say("no run is chosen"); draw(); return; }
  const query = new URLSearchParams(chosen.map((label) => ["run", label]));
  source = new EventSource(`events?${query}`);
  source.onopen = () => { say("connected"); };
  source.onmessage = (event) => { take(JSON.parse(event.data)); };
  source.addEventListener("end", (event) => { source.close(); say(JSON.parse(event.data)); });
  source.onerror = () => {
    say(source.readyState === EventSource.CLOSED ? "the server does not answer; reload the page" : "the connection is lost; trying again");
  };
}

function say(text) { if ($("#connection").textContent !== text) $("#connection").textContent = text; }

// ---- which runs

async function listRuns() {
  const answer = await fetch("runs");
  if (!answer.ok) throw new Error(await answer.text());
  offer(await answer.json());
}

function offer(found) {
  const labels = found.map((one) => one.label);
  if (JSON.stringify(labels) === JSON.stringify(listed)) return;
  const asked = new URLSearchParams(location.hash.slice(1)).getAll("run").filter((label) => labels.includes(label));
  const first = !listed.length;
  listed = labels;
  if (first) chosen = asked.length ? asked : found.filter((one) => one.first).map((one) => one.label);
  chosen = chosen.filter((label) => labels.includes(label));
  if (!chosen.includes(focused)) focused = chosen[0] ?? null;
  if (first) connect();
  draw();
}

function choose(label, on) {
  chosen = listed.filter((one) => (one === label ? on : chosen.includes(one)));
  if (!chosen.includes(focused)) focused = chosen[0] ?? null;
  history.replaceState(null, "", `#${new URLSearchParams(chosen.map((one) => ["run", one]))}`);
  connect();
}

function focusOn(label) {
  if (!chosen.includes(label)) choose(label, true);
  focused = label;
  draw();
}

function swatch(i) {
  const made = el("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = `var(--c${i % COLOURS})`;
  return made;
}

function lastReward(run) {
  const done = run.evaluations.filter((one) => known(one.reward_mean));
  return done.length ? `${reward(done[0].reward_mean)}${done.length > 1 ? ` → ${reward(done[done.length - 1].reward_mean)}` : ""}` : "–";
}

function drawRuns() {
  const body = $("#runs tbody");
  $("#runs").hidden = listed.length < 2;
  fill(body, [listed, chosen], () => listed.map((label) => {
    const box = el("input", { type: "checkbox", "aria-label": `show ${label}`, onchange: (event) => choose(label, event.target.checked) });
    box.checked = chosen.includes(label);
    const name = el("button", { type: "button", onclick: () => focusOn(label) }, label);
    const mark = chosen.includes(label) ? swatch(colourOf(label)) : null;
    return el("tr", {}, el("td", {}, el("label", {}, box, mark), " ", name), ...Array.from({ length: 7 }, () => el("td")));
  }));
  listed.forEach((label, i) => {
    const cells = body.children[i].children, run = runs.get(label), now = run?.now;
    cells[0].querySelector("button").setAttribute("aria-pressed", String(label === focused));
    const texts = now ? [now.state, `${now.version} / ${now.target ?? "–"}`, reward(now.numbers.reward_mean), lastReward(run),
      short(now.numbers.lag_mean), duration(now.elapsed * 60), now.schedule ?? "–"] : ["", "", "", "", "", "", ""];
    texts.forEach((text, j) => { if (cells[j + 1].textContent !== text) cells[j + 1].textContent = text; });
    cells[1].className = now ? now.state : "";
  });
  drawDifferences();
}

function flat(value, prefix, into) {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    for (const [name, item] of Object.entries(value)) flat(item, prefix ? `${prefix}.${name}` : name, into);
  } else into[prefix] = typeof value === "string" ? value : JSON.stringify(value);
  return into;
}

function drawDifferences() {
  const all = chosen.map((label) => flat(runs.get(label)?.settings ?? {}, "", {}));
  const names = [...new Set(all.flatMap((one) => Object.keys(one)))].sort();
  const differ = names.filter((name) => name !== "run_dir" && new Set(all.map((one) => one[name])).size > 1);
  $("#differences").hidden = chosen.length < 2 || !differ.length;
  const rows = differ.map((name) => [name, ...all.map((one) => one[name] ?? "–")]);
  fill($("#differences div"), [chosen, rows], () => [table(["setting", ...chosen], rows)]);
}

function drawWords(section, header, rows) {
  $(section).hidden = !rows.length;
  fill($(`${section} .words`), [header, rows], () => [table(header, rows)]);
}

function drawResults(run) {  // and what the focused run was made with
  const all = chosen.map((label) => new Map(runs.get(label)?.result ?? []));
  const names = [...new Set(all.flatMap((one) => [...one.keys()]))];
  drawWords("#result", chosen.length > 1 ? ["", ...chosen] : [], names.map((name) => [name, ...all.map((one) => one.get(name) ?? "–")]));
  drawWords("#gain", ["training", "problem", "answer", "reward"], run?.gain ?? []);
  drawWords("#settings", [], Object.entries(flat(run?.settings ?? {}, "", {})));
}

// ---- one run

function drawRun(run) {
  const now = run?.now;
  $("#run").hidden = !now;
  if (!now) return;
  $("#run-title").textContent = focused;
  if (!whole) document.title = `${now.state === "running" ? `${now.version}/${now.target ?? "?"}` : now.state} · ${focused}`;
  $("#state").textContent = now.state;
  $("#state").className = `pill ${now.state}`;
  $("#facts").textContent = [now.task, now.schedule, known(now.seed) ? `seed ${now.seed}` : null].filter(Boolean).join(" · ");
  const latest = (run.steps.columns.reward_mean ?? []).slice(-5).filter(known);
  const mean = latest.length ? latest.reduce((a, b) => a + b, 0) / latest.length : null;
  const headline = [["held-out reward, before → now", lastReward(run)], [`training reward, mean of ${latest.length} steps`, reward(mean)],
    ["lag, in steps", short(now.numbers.lag_mean)], ["tokens per answer", short(now.numbers.completion_length_mean)]];
  fill($("#headline"), headline, () => headline.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  const share = now.target ? now.version / now.target : 0;
  $("#progress").value = share;
  const left = known(now.left) ? `, ${duration(now.left * 60)} left` : "";
  $("#times").textContent = `step ${now.version} of ${now.target ?? "–"} · ${(100 * share).toFixed(0)}% · ${duration(now.elapsed * 60)} elapsed${left}`;
  const damaged = now.damaged ? `${now.damaged} lines of the records are damaged and left out` : "";
  $("#message").textContent = [now.message, damaged].filter(Boolean).join("\n");
  $("#message").hidden = !$("#message").textContent;
}

const MARKS = { starting: "◌", working: "●", waiting: "◦", done: "✓", failed: "✗" };

function drawStages(run) {
  const stages = whole ? [] : run?.now?.stages ?? [];
  $("#stages").hidden = !stages.length;
  fill($("#stages ol"), stages, () => stages.map((one) => {
    const silent = known(one.silent_s) ? el("span", { class: "bad" }, `no report for ${duration(one.silent_s)}; `) : null;
    const waits = one.waits_on.length ? ` (waits for ${one.waits_on.join(", ")})` : "";
    const place = one.machine ? ` on ${one.machine}` : "";
    return el("li", {}, el("strong", {}, one.stage + place),
      el("span", { class: one.state }, `${MARKS[one.state] ?? ""} ${one.state} ${duration(one.for_s)}`),
      el("span", { class: "detail" }, silent, one.detail, el("span", { class: "dim" }, waits)),
      el("span", { class: "rates" }, [one.busy && `${one.busy} busy`, one.rate].filter(Boolean).join(" · ")));
  }));
}

function drawSlots(run) {
  const now = run?.now, engine = now?.engine, facts = Object.entries(now?.facts ?? {});
  $("#slots").hidden = !engine || !engine.slots;
  if ($("#slots").hidden) return;
  const begun = now.begun, first = begun.reduce((sum, [, count]) => sum + count, 0);
  const total = Math.max(engine.slots, engine.in_progress);
  const parts = first ? begun : [[null, engine.in_progress]];
  const across = begun.reduce((sum, [version, count]) => sum + (version < engine.version ? count : 0), 0);
  fill($("#slots .bar"), [parts, total], () => parts.map(([version, count]) => {
    const part = el("span", { class: version === null ? "v0" : `v${version % COLOURS}`, title: version === null ? "" : `${count} began with version ${version}` },
      version !== null && count / total > 0.06 ? `v${version}` : "");
    part.style.width = `${(100 * count) / total}%`;
    return part;
  }));
  $("#slots .bar").setAttribute("aria-label", `${engine.in_progress} of ${engine.slots} slots in use`);
  const began = begun.map(([version, count]) => `v${version}: ${count}`).join(", ");
  $("#slots .legend").textContent = first
    ? `${across} of ${first} sequences cross weight versions: they began before the engine took version ${engine.version} (began at ${began}).` : "";
  fill($("#slots .facts"), facts, () => facts.map(([name, text]) => el("p", {}, `${name}: ${text}`)));
}

function drawEvaluations(run) {
  const found = run?.evaluations ?? [];
  $("#evaluations").hidden = !found.length;
  fill($("#evaluations tbody"), found, () => [...found].reverse().map((one) => {
    const weights = known(one.version_max) && one.version_max !== one.version_min ? `v${one.version_min}–v${one.version_max}` : `v${one.version}`;
    const failed = Object.entries(one.failed).map(([reason, count]) => `${reason} ${count}`).join(", ");
    const error = one.reward_standard_error;
    const sets = Object.entries(one.metrics).map(([name, value]) => `; ${name} ${reward(value)}`).join("");
    const cells = [one.when === "online" ? "during training" : `${one.when} training`, weights,
      `${reward(one.reward_mean)}${known(error) ? ` ± ${error.toFixed(3)}` : ""}${sets}`, String(one.problems), short(one.completion_length_mean), failed || "–"];
    return el("tr", {}, ...cells.map((text) => el("td", {}, text)));
  }));
}

function drawRollouts(run) {
  const found = run?.groups;
  $("#rollouts").hidden = !found?.groups.length;
  if (held || !found) return;
  $("#missing").textContent = found.missing ? `Token ids only: ${found.missing}` : "";
  $("#missing").hidden = !found.missing;
  fill($("#rollouts .groups"), found.groups, () => found.groups.map((group) => {
    const dropped = Object.entries(group.dropped).map(([reason, count]) => `${reason} ${count}`).join(", ");
    const more = group.more ? el("p", { class: "dim" }, `and ${group.more} more attempts`) : null;
    return el("article", { class: "group" }, el("h3", {}, `Group ${group.index}`), el("pre", {}, group.problem),
      dropped ? el("p", { class: "dim" }, `dropped: ${dropped}`) : null,
      group.skipped ? el("p", { class: "dim" }, group.skipped) : null,
      el("div", { class: "attempts" }, ...group.attempts.map(attempt)), more);
  }));
}

function attempt(one) {
  const tokens = one.turns.reduce((sum, turn) => sum + turn.tokens, 0);
  const versions = one.turns.flatMap((turn) => turn.spans.map((span) => span.version));
  const low = Math.min(...versions), high = Math.max(...versions);
  const range = !versions.length ? "" : low === high ? ` · v${low}` : ` · v${low}–v${high}`;
  const end = one.turns.length ? ` · ${one.turns[one.turns.length - 1].finish}` : "";
  return el("div", { class: "attempt" },
    el("p", {}, el("b", {}, `reward ${short(one.reward)}`), ` · ${one.id} · ${tokens} tokens${range}${end}`),
    ...one.turns.map((turn) => el("pre", { tabindex: "0", role: "group", "aria-label": `${one.id}, prompt and completion` }, el("span", { class: "prompt" }, turn.prompt),
      ...turn.spans.flatMap((span) => [el("sup", { title: `version ${span.version}, ${span.tokens} tokens` }, String(span.version)),
        el("span", { class: `v${Math.max(0, span.version) % COLOURS}` }, span.text)]),
      turn.hidden ? el("span", { class: "prompt" }, ` … ${turn.hidden} more tokens`) : null)));
}

// ---- curves

function smoothed(values, window) {
  return values.map((_, i) => {
    const some = values.slice(Math.max(0, i + 1 - window), i + 1).filter(known);
    return some.length ? some.reduce((a, b) => a + b, 0) / some.length : null;
  });
}

function linesOf(spec) {
  // Several runs: the first line of each, in the run's colour. One run: all its lines.
  const several = chosen.length > 1, found = [];
  if (spec.fixed) {
    const { x, lines, intervals } = spec.fixed;
    const limits = intervals.flatMap((pair, c) => pair.map((y) => ({ label: "", c, x, y, faint: true })));
    return [...limits, ...Object.entries(lines).map(([label, y], c) => ({ label, c, x, y }))];
  }
  chosen.forEach((label) => {
    const run = runs.get(label), i = colourOf(label);
    if (!run) return;
    const table = spec.load ? run.load : run.steps, x = table.columns[spec.load ? "minutes" : axis];
    (several ? spec.lines.slice(0, 1) : spec.lines).forEach(([name, text], j) => {
      const y = table.columns[name];
      if (!x || !y || !y.some(known)) return;
      if (j && y.every((value, k) => value === table.columns[spec.lines[0][0]]?.[k])) return;  // as the first line
      const c = several ? i : j;
      const wide = spec.smooth && y.length >= 4 * spec.smooth;
      if (wide && !several && j === 0) found.push({ label: "", c, x, y, faint: true });
      found.push({ label: (several ? label : text) + (wide ? `, mean of ${spec.smooth} steps` : ""), c, x, y: wide ? smoothed(y, spec.smooth) : y });
    });
    const points = spec.heldOut ? run.evaluations.filter((one) => known(one.reward_mean)) : [];
    const at = new Map(points.map((one) => [one[axis], one.reward_mean]));  // several at one place: the last
    if (at.size) {
      const sorted = [...at].sort((a, b) => a[0] - b[0]);
      found.push({ label: several ? "" : "held out", c: several ? i : 2, x: sorted.map((one) => one[0]), y: sorted.map((one) => one[1]), points: true });
    }
  });
  return found;
}

class Chart {
  constructor(spec) {
    this.spec = spec;
    this.keys = el("div", { class: "keys" });
    this.place = el("div");
    this.title = el("h3", {}, spec.title);
    this.figure = el("figure", {}, el("figcaption", {}, this.title, this.keys), this.place);
    this.plot = null;
    this.shape = "";
    this.height = spec.large ? 280 : 190;
    this.size = new ResizeObserver(() => { if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: this.height }); });
    this.size.observe(this.place);
  }

  draw() {
    const lines = linesOf(this.spec);
    this.figure.hidden = !lines.length;
    if (!lines.length || !this.place.clientWidth) return;
    const data = uPlot.join(lines.map((line) => [line.x, line.y]));
    this.lines = lines;
    this.title.textContent = chosen.length > 1 && this.spec.lines?.length > 1 ? `${this.spec.title}: ${this.spec.lines[0][1]}` : this.spec.title;
    const shape = JSON.stringify([lines.map((line) => [line.label, line.c, line.points, line.faint]), axis]);
    if (this.plot && shape === this.shape) { this.plot.setData(data); this.showKeys(); return; }
    this.shape = shape;
    if (this.plot) this.plot.destroy();
    const text = { stroke: () => css("--dim"), grid: { stroke: () => css("--rule"), width: 1 }, ticks: { stroke: () => css("--rule"), width: 1, size: 4 },
      font: "11px system-ui, sans-serif" };
    const low = this.spec.zero || this.spec.share ? 0 : null;
    const range = this.spec.fixed?.log ? undefined : this.spec.share ? () => [0, 1] : (_, min, max) => {
      const [a, b] = uPlot.rangeNum(low ?? min, max === min ? max + (Math.abs(max) || 1) * 0.1 : max, 0.1, true);
      return [low ?? a, b];
    };
    const own = this.xLabel();  // the choice of the horizontal axis does not hold here, so that axis has a label of its own
    const xLabel = own ?? AXES[axis];
    this.plot = new uPlot({
      width: this.place.clientWidth, height: this.height, padding: [8, 16, 0, 0], legend: { show: false },
      cursor: { sync: { key: xLabel }, y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: { range, distr: this.spec.fixed?.log ? 3 : 1 } },
      axes: [{ ...text, size: 30, ...(own || axis === "minutes" ? {} : { incrs: WHOLE }), values: (_, all) => all.map(short), ...(own ? { label: own, labelSize: 16, labelFont: text.font } : {}) }, { ...text, size: 46, values: (_, all) => all.map(short) }],
      series: [{}, ...lines.map((line) => ({
        stroke: () => colour(line.c), width: line.faint ? 1 : 1.75, alpha: line.faint ? 0.3 : 1, spanGaps: true,
        ...(line.points ? { paths: () => null, points: { show: true, size: 9, width: 2.5, fill: () => css("--paper") } } : { points: { show: line.x.length < 40, size: 4 } }),
      }))],
      hooks: { setCursor: [() => this.showKeys()] },
    }, data, this.place);
    this.showKeys();
  }

  showKeys() {  // the values under the cursor, or the latest ones
    if (!this.plot || !this.lines) return;
    const data = this.plot.data, at = this.plot.cursor.idx ?? data[0].length - 1;
    const shown = this.lines.map((line, i) => ({ line, i })).filter(({ line }) => line.label);
    const values = shown.map(({ line, i }) => {
      let place = at;
      while (place >= 0 && !known(data[i + 1][place])) place -= 1;
      const value = place < 0 ? null : data[i + 1][place];
      return [line.label, line.c, short(value) + (known(value) && value < this.spec.low ? " (low)" : "")];
    });
    const where = this.plot.cursor.idx === null || this.plot.cursor.idx === undefined ? "" : `${this.xLabel() ?? AXES[axis]} ${short(data[0][at])}`;
    fill(this.keys, [values, where], () => [...values.map(([label, c, value]) => el("span", {}, swatch(c), label, el("b", {}, value))), where ? el("span", {}, where) : ""]);
  }

  xLabel() { return this.spec.fixed ? this.spec.fixed.x_label : this.spec.load ? LOAD_AXIS : null; }

  forget() { this.shape = ""; }

  remove() {
    this.size.disconnect();
    if (this.plot) this.plot.destroy();
    this.figure.remove();
  }
}

const charts = CHARTS.map((spec) => new Chart(spec));
const others = new Map();
const fixed = [];  // the charts of sections

function drawSections(sections) {
  $("#sections").append(...sections.map((one) => {
    const found = one.charts.map((chart) => new Chart({ title: chart.title, fixed: chart }));
    fixed.push(...found);
    return el("section", {}, el("h2", {}, one.title), ...one.texts.map((text) => el("p", {}, text)),
      one.rows.length ? table(one.header, one.rows, one.strong) : null, el("div", { class: "grid" }, ...found.map((chart) => chart.figure)));
  }));
}

function drawCurves() {
  for (const chart of fixed) chart.draw();
  $("#curves").hidden = ![...runs.values()].some((run) => run.steps.points || run.load.points);
  $("#reward").hidden = $("#curves").hidden;
  for (const chart of charts) chart.draw();
  const open = $("#more").open;
  const names = new Set([...runs.values()].flatMap((run) => Object.keys(run.steps.columns)));
  const wanted = [...names].filter((name) => !OWN_CHARTS.has(name)).sort().slice(0, MOST_OTHERS);
  $("#more").hidden = !wanted.length;
  if (!open) return;
  for (const [name, chart] of others) if (!wanted.includes(name)) { chart.remove(); others.delete(name); }
  for (const name of wanted) {
    if (!others.has(name)) {
      others.set(name, new Chart({ title: name, lines: [[name, "value"]] }));
      $("#more .grid").append(others.get(name).figure);
    }
    others.get(name).draw();
  }
}

function draw() {
  const run = runs.get(focused);
  drawRuns();
  drawRun(run);
  drawResults(run);
  drawStages(run);
  drawSlots(run);
  drawCurves();
  drawEvaluations(run);
  drawRollouts(run);
}

// ---- beginning

$("#reward").append(charts[0].figure);
$("#curves .grid").append(...charts.slice(1).map((chart) => chart.figure));
$("#more").addEventListener("toggle", drawCurves);
for (const button of document.querySelectorAll("input[name=axis]")) {
  button.addEventListener("change", () => { axis = button.value; drawCurves(); });
}
$("#hold").addEventListener("click", () => {
  held = !held;
  $("#hold").setAttribute("aria-pressed", String(held));
  draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of [...charts, ...others.values(), ...fixed]) chart.forget();
  draw();
});
if (whole) {
  document.title = whole.title;
  $("#title").textContent = whole.title;
  say(`written ${whole.written}`);
  $("#hold").hidden = true;
  drawSections(whole.sections);
  for (const { label, colour: tint } of whole.runs) tints.set(label, tint);
  offer(whole.runs);
  take(whole.news);
} else {
  listRuns().catch((error) => { say(error.message); });
  setInterval(() => { listRuns().catch(() => { /* `connection` says it */ }); }, 10000);
}
