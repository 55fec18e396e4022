"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (name, text, cls) => {
  const e = document.createElement(name);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  return e;
};
const count = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
const percent = x => `${(100 * x).toFixed(1)} %`;
const mean = xs => xs.reduce((a, b) => a + b, 0) / xs.length;
const layers = data.layers, heads = layers[0].heads.length;
const prompt = data.prompt_tokens;

/* What has come by step s: a token is there from its birth on, held until it is gone. */
const birth = i => Math.max(0, i - prompt + 1);
const by = (at, s) => at !== -1 && at <= s;
const held = (head, i, s) => birth(i) <= s && !by(head.gone[i], s);

/* Which tokens a head read at step s, and how many; null: all that it held. */
const marks = new Map();
function reads(head, s) {
  if (!head.read) return null;
  if (!marks.has(head)) marks.set(head, []);
  const known = marks.get(head);
  if (!known[s]) {
    known[s] = {at: new Uint8Array(data.tokens.length), count: 0};
    for (let j = 0; j < head.read[s].length; j += 2) {
      const [lo, n] = head.read[s].slice(j, j + 2);
      known[s].at.fill(1, lo, lo + n);
      known[s].count += n;
    }
  }
  return known[s];
}
const isRead = (head, i, s) => !head.read || reads(head, s).at[i] === 1;
const PART = {clusters: "cluster", pages: "page"};
/* The one head that the selectors speak of, if it has clusters or pages. */
function parted() {
  if (now.view !== "read" || now.layer < 0 || now.head < 0) return null;
  const layer = layers[now.layer], head = layer.heads[now.head];
  return head.parts && {head, name: PART[layer.index]};
}

/* A view gives every held token of a head a level from 0 to 1, and says what levels mean.
   "of" is what a token's shade is a share of: all chosen heads, or those that hold it. */
const VIEWS = {
  read: {
    name: "read tokens", least: "read by no head", most: "by every head", of: "all",
    did: "reads", done: "read", doing: "read",
    level: (head, i, s) => +isRead(head, i, s),
    tokens: (f, s) => f.head.read ? reads(f.head, s).count : layers[f.l].held[s],
    mass: (f, s) => (f.head.read_mass || f.head.mass)[s],
    lines: (found, i, s) => {
      const some = found.filter(f => f.held && isRead(f.head, i, s));
      const lines = [["read by", `${some.length} of ${count(found.length, "head")}`]];
      const one = parted();
      if (!one) return lines;
      const steps = one.head.read.map((_, j) => j).filter(j => j && j >= birth(i) && isRead(one.head, i, j));
      lines.push(["at steps", steps.join(", ") || "none but the prompt's"]);
      const part = one.head.parts[i];
      const inside = one.head.parts.map((p, j) => j).filter(j => part >= 0 && one.head.parts[j] === part);
      const inNow = inside.filter(j => isRead(one.head, j, s)).length;
      lines.push([one.name, part < 0 || !by(one.head.indexed[i], s) ? "in none yet: always read"
        : `${part}: ${count(inside.length, "token")}, ${inNow} read now`]);
      return lines;
    },
  },
  kept: {
    name: "kept tokens", least: "held by no head", most: "by every head", of: "all",
    level: () => 1,
    lines: () => [],
  },
  format: {
    name: "format", least: "exact", most: "packed, keys and values", of: "holding",
    level: (head, i, s) => (by(head.packed.keys[i], s) + by(head.packed.values[i], s)) / 2,
    lines: (found, i, s) => ["keys", "values"].map(side => {
      const packed = found.filter(f => f.held && by(f.head.packed[side][i], s)).length;
      const exact = found.filter(f => f.held).length - packed;
      const parts = [packed && `packed in ${packed}`, exact && `exact in ${exact}`];
      return [side, parts.filter(Boolean).join(", ") || "not held"];
    }),
  },
};
const measure = {
  did: "holds", done: "held", doing: "kept",
  tokens: (f, s) => layers[f.l].held[s], mass: (f, s) => f.head.mass[s],
};
for (const view of Object.values(VIEWS)) Object.setPrototypeOf(view, measure);
const now = {view: data.views[0], layer: -1, head: -1, step: 0, token: 0};

/* The heads the selectors speak of: [{l, h, head}]. */
function chosen(l = now.layer, h = now.head) {
  const found = [];
  layers.forEach((layer, a) => (l < 0 || a === l) && layer.heads.forEach((head, b) => {
    if (h < 0 || b === h) found.push({l: a, h: b, head});
  }));
  return found;
}
function shade(found, i) {
  const view = VIEWS[now.view];
  let holding = 0, sum = 0;
  for (const f of found) {
    if (!held(f.head, i, now.step)) continue;
    holding += 1;
    sum += view.level(f.head, i, now.step);
  }
  return {holding, level: holding ? sum / (view.of === "all" ? found.length : holding) : 0};
}
const where = () => {
  const l = now.layer < 0 ? "all layers" : `layer ${layers[now.layer].number}`;
  return `${l}, ${now.head < 0 ? "all heads" : `head ${now.head}`}`;
};
const when = s => s === 0 ? "after the prompt" : `after ${JSON.stringify(data.tokens[prompt + s - 1])}`;

const spans = data.tokens.map((text, i) => {
  const e = make("span", undefined, i < prompt ? "t" : "t made");
  e.dataset.i = i;
  e.tabIndex = -1;
  if (text === "") e.append(make("s", "·"));
  for (const part of text.split(/(\n)/)) {
    if (part === "\n") e.append(make("s", "⏎"), "\n");
    else if (part) e.append(part);
  }
  return e;
});

function draw() {
  const found = chosen(), seen = prompt + now.step;
  let none = 0;
  spans.forEach((e, i) => {
    const born = birth(i) <= now.step;
    e.classList.toggle("later", !born);
    e.classList.toggle("born", now.step > 0 && birth(i) === now.step);
    const {holding, level} = shade(found, i);
    if (born && !(now.view === "read" ? level : holding)) none += 1;
    e.classList.toggle("gone", born && !holding);
    e.style.setProperty("--p", (100 * level).toFixed(1));
  });
  document.querySelector("main").dataset.view = now.view;
  const view = VIEWS[now.view];
  $("least").textContent = view.least;
  $("most").textContent = view.most;
  $("view").value = now.view;
  $("layer").value = now.layer;
  $("head").value = now.head;
  $("step").value = now.step;
  $("when").textContent = `${now.step} of ${data.steps}: ${when(now.step)}`;
  $("step").setAttribute("aria-valuetext", $("when").textContent);
  $("back").disabled = now.step === 0;
  $("next").disabled = now.step === data.steps;
  sum(found, seen, none);
  bars($("layers"), "layer", layers.map((layer, l) => ({
    label: layer.number, on: l === now.layer, pick: () => set({layer: l === now.layer ? -1 : l}),
    held: mean(chosen(l).map(f => view.tokens(f, now.step))), budget: layer.budget,
    mass: mean(chosen(l).map(f => view.mass(f, now.step))),
  })), seen);
  $("headtitle").textContent = "Heads, " + (now.layer < 0 ? "mean of all layers" : `layer ${layers[now.layer].number}`);
  bars($("heads"), "head", Array.from({length: heads}, (_, h) => ({
    label: h, on: h === now.head, pick: () => set({head: h === now.head ? -1 : h}),
    held: mean(chosen(now.layer, h).map(f => view.tokens(f, now.step))),
    mass: mean(chosen(now.layer, h).map(f => view.mass(f, now.step))),
  })), seen);
  parts();
  detail();
}
function sum(found, seen, none) {
  const view = VIEWS[now.view], tokens = mean(found.map(f => view.tokens(f, now.step)));
  const at = $("said");
  at.textContent = `${when(now.step)}, ${where()}: a head ${view.did} `.replace(/^a/, "A");
  at.append(make("b", Math.round(tokens).toLocaleString("en")), ` of ${count(seen, "token")} (${percent(tokens / seen)}); on them falls `);
  at.append(make("b", percent(mean(found.map(f => view.mass(f, now.step))))), ` of this step's exact attention. `);
  at.append(none ? `${count(none, "token")} ${none === 1 ? "is" : "are"} ${view.done} by none of these heads.` : `Every token is ${view.done} by at least one of them.`);
}
function bars(box, what, rows, seen) {
  const top = make("div", undefined, "row head");
  top.append(make("span", ""), make("span", `tokens ${VIEWS[now.view].done}`), make("span", `attention mass ${VIEWS[now.view].doing}`));
  const focused = [...box.children].indexOf(document.activeElement);
  box.replaceChildren(top, ...rows.map(r => {
    const e = make("button", undefined, "row");
    e.type = "button";
    const bar = (w, c, budget) => {
      const b = make("span", undefined, "bar");
      if (budget < 1) b.style.setProperty("--b", 100 * budget);
      b.style.setProperty("--w", 100 * w);
      b.style.setProperty("--c", `var(--${c})`);
      return b;
    };
    const n = Math.round(r.held);
    e.append(make("span", r.label), bar(r.held / seen, "kept", r.budget / seen || 1), make("span", `${n}`), bar(r.mass, "mass"), make("span", percent(r.mass)));
    const budget = r.budget == null ? "" : `, budget ${r.budget}`;
    e.title = `${what} ${r.label}: ${n} of ${seen} tokens${budget}, ${percent(r.mass)} of the attention mass`;
    e.setAttribute("aria-label", e.title);
    e.setAttribute("aria-pressed", r.on);
    e.addEventListener("click", r.pick);
    return e;
  }));
  if (focused > 0) box.children[focused].focus();
}
function score(list) {
  const numbers = list.filter(x => typeof x === "number");
  const fixed = list.filter(x => x === "inf").length;
  if (!numbers.length) return fixed ? "protected" : null;
  const text = Number(mean(numbers).toPrecision(4)).toString();
  return numbers.length + fixed > 1 ? `${text}, mean of ${numbers.length} heads` : text;
}
/* The clusters or pages of one head: a cell each, darker the more of it the step read. */
function parts() {
  const box = $("parts"), one = parted();
  box.hidden = now.view !== "read";
  if (box.hidden) return;
  if (!one) {
    box.replaceChildren(make("h2", "Clusters and pages"), make("p", "Choose a layer and a head to see its clusters or pages; the first layers may have none.", "quiet"));
    return;
  }
  const {head, name} = one, size = [], got = [], first = [];
  let loose = 0;
  data.tokens.forEach((_, i) => {
    if (birth(i) > now.step) return;
    const p = by(head.indexed[i], now.step) ? head.parts[i] : -1;
    if (p < 0) loose += held(head, i, now.step);
    else {
      size[p] = (size[p] || 0) + 1;
      got[p] = (got[p] || 0) + isRead(head, i, now.step);
      first[p] ??= i;
    }
  });
  const all = size.filter(n => n).length, some = got.filter(n => n).length;
  const cells = make("div", undefined, "grid wide");
  cells.setAttribute("role", "img");
  cells.setAttribute("aria-label", `which ${name}s the step read`);
  size.forEach((n, p) => {
    const e = make("span");
    if (got[p]) { e.dataset.p = got[p] / n; e.style.setProperty("--p", 100 * got[p] / n); }
    e.title = `${name} ${p}: ${got[p]} of ${count(n, "token")} read`;
    e.addEventListener("click", () => look(first[p]));
    cells.append(e);
  });
  box.replaceChildren(
    make("h2", `${name[0].toUpperCase()}${name.slice(1)}s, layer ${layers[now.layer].number}, head ${now.head}`),
    make("p", `${some} of ${count(all, name)} read, in full or in part; ${count(loose, "token")} in none, always read.`, "quiet"),
    cells);
}
function detail() {
  const i = now.token, box = $("token"), view = VIEWS[now.view], one = parted();
  const part = one && by(one.head.indexed[i], now.step) ? one.head.parts[i] : -1;
  spans.forEach((e, j) => {
    e.classList.toggle("at", j === i);
    e.classList.toggle("mate", part >= 0 && one.head.parts[j] === part);
    e.tabIndex = j === i ? 0 : -1;
  });
  const found = chosen().map(f => ({...f, held: held(f.head, i, now.step)}));
  const holding = found.filter(f => f.held);
  const title = make("h2");
  title.append(make("span", data.tokens[i] || "·", "piece"), ` token ${i}`);
  const dl = make("dl");
  const line = (name, value) => dl.append(make("dt", name), make("dd", value));
  line("is", i < prompt ? "of the prompt" : `generated at step ${birth(i)}`);
  if (birth(i) > now.step) line("held", "not there yet");
  else {
    line("held by", `${holding.length} of ${count(found.length, "head")} (${where()})`);
    if (holding.length && holding.length < found.length) line("which", which(holding));
    if (view.lines) view.lines(found, i, now.step).forEach(l => line(...l));
  }
  const scored = found.filter(f => f.head.scores);
  const first = score(scored.map(f => f.head.scores.first[i]));
  const last = score(scored.map(f => f.head.scores.last[i]));
  if (first !== null) line("score", `${first} (in the choice after the prompt)`);
  if (last !== null && last !== first) line("last score", `${last} (when last chosen from)`);
  box.replaceChildren(title, dl, cells(i), make("p", "column: layer, row: head; filled: holds it", "quiet"));
}
function which(holding) {
  const some = [...new Set(holding.map(f => f.l))];
  if (some.length > 8) return "the filled cells below";
  return some.map(l =>
    `layer ${layers[l].number}: ${holding.filter(f => f.l === l).map(f => f.h).join(", ")}`).join("; ");
}
/* One cell a head: a column is a layer, a row a head. */
function cells(i) {
  const box = make("div", undefined, "grid"), view = VIEWS[now.view];
  box.style.gridTemplateColumns = `repeat(${layers.length}, auto)`;
  box.style.setProperty("--cell", `${Math.max(6, Math.min(16, Math.floor(330 / layers.length) - 2))}px`);
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", "which heads hold the token; a column is a layer, a row a head");
  for (let h = 0; h < heads; h++) layers.forEach((layer, l) => {
    const head = layer.heads[h], e = make("span"), here = held(head, i, now.step);
    if (here) {
      const level = view.level(head, i, now.step);
      e.dataset.p = level;
      e.style.setProperty("--p", 100 * level);
    }
    const s = head.scores && score([head.scores.last[i]]);
    const gone = by(head.gone[i], now.step) ? `dropped ${when(head.gone[i])}` : here ? "held" : "not there yet";
    e.title = `layer ${layer.number}, head ${h}: ${gone}${s === null ? "" : `, last score ${s}`}`;
    const out = (now.layer >= 0 && l !== now.layer) || (now.head >= 0 && h !== now.head);
    if (out) e.className = "off";
    box.append(e);
  });
  return box;
}
function set(changes) { Object.assign(now, changes); draw(); }
function look(i) {
  if (!(i >= 0) || i >= spans.length || birth(i) > now.step) return;
  now.token = i;
  detail();
}
function options(select, list) {
  select.replaceChildren(...list.map(([value, text]) => {
    const o = make("option", text);
    o.value = value;
    return o;
  }));
}

$("recipe").textContent = data.recipe;
document.title = `${data.recipe} – kvloom inspect`;
const cut = data.text_tokens > prompt ? ` (the first of ${data.text_tokens.toLocaleString("en")})` : "";
$("about").textContent = [
  data.summary, data.model, data.source, `${count(prompt, "token")} of prompt${cut} and ${data.steps} generated`,
  `${count(layers.length, "layer")} × ${count(heads, "key/value head")}`,
  `keys ${data.formats.keys}; values ${data.formats.values}`,
  data.stock_layers.length && `layers ${data.stock_layers.join(", ")} are not held by kvloom`,
].filter(Boolean).join(" · ");
$("toml").textContent = data.toml;
options($("view"), data.views.map(v => [v, VIEWS[v].name]));
$("viewbox").hidden = data.views.length < 2;
$("viewbox").style.display = data.views.length < 2 ? "none" : "";
options($("layer"), [[-1, "all"], ...layers.map((layer, l) => [l, layer.number])]);
options($("head"), [[-1, "all"], ...Array.from({length: heads}, (_, h) => [h, h])]);
$("step").max = data.steps;
$("madelegend").hidden = data.steps === 0;
$("text").append(...spans);
for (const [name, what] of [
  ["A head", "is a key/value head: query heads that share keys and values are one. Every head decides for itself which tokens it holds."],
  ["Step", "0 is after the prompt was read; step s is after the s-th generated token was read. Generation is greedy, with this cache."],
  ["Shade", "the share of the chosen heads, over the chosen layers, that hold the token after the step. In the view of formats: how much of what holds it is packed, keys and values counting half each."],
  ["Read", "recipes that recall hold every token and read a part of them at each step: what an index finds for the step's queries, and what is always read. In the view of read tokens the shade, the bars and the mass speak of that. With one head chosen, its clusters or pages are shown, and the token under the pointer underlines its own."],
  ["Tokens held", "by each head of a layer, of all tokens so far. A stroke marks the layer's budget, where it has one: what comes after the prompt is held beside it by recipes that choose only once."],
  ["Attention mass kept", "each query of the step (all of the prompt's at step 0, one at a later step, of every query head) pays attention to all tokens up to itself: the softmax of its logits over the keys of this run, exact, at their own positions and with nothing dropped. The figure is the sum that falls on tokens held after the step, over the whole sum; layers and heads together are the plain mean. After the prompt it looks back: the prompt itself is attended to in full."],
  ["Score", "the number by which the recipe chose, if it chooses by score. First: in the choice after the prompt. Last: when the token was last chosen from, in the end or when it was dropped. “Protected” tokens stay whatever they score."],
  ["Keys", "the arrow keys, Home and End go from token to token once one has the focus; Tab goes on to the bars, which choose a layer or a head."],
]) $("terms").append(make("dt", name), make("dd", what));

$("view").addEventListener("change", e => set({view: e.target.value}));
$("layer").addEventListener("change", e => set({layer: +e.target.value}));
$("head").addEventListener("change", e => set({head: +e.target.value}));
$("step").addEventListener("input", e => set({step: +e.target.value}));
$("back").addEventListener("click", () => set({step: Math.max(0, now.step - 1)}));
$("next").addEventListener("click", () => set({step: Math.min(data.steps, now.step + 1)}));
const at = e => { const t = e.target.closest(".t[data-i]"); return t ? +t.dataset.i : -1; };
$("text").addEventListener("mouseover", e => look(at(e)));
$("text").addEventListener("click", e => { const i = at(e); look(i); if (i >= 0) spans[i].focus(); });
$("text").addEventListener("focusin", e => look(at(e)));
$("text").addEventListener("keydown", e => {
  const last = prompt + now.step - 1;
  const to = {ArrowRight: now.token + 1, ArrowLeft: now.token - 1, ArrowDown: now.token + 10,
    ArrowUp: now.token - 10, Home: 0, End: last}[e.key];
  if (to === undefined) return;
  e.preventDefault();
  spans[Math.max(0, Math.min(last, to))].focus();
});
draw();
