const layers = data.layers, heads = layers[0].heads.length;
const prompt = data.prompt_tokens;

/* A token exists from the step of its birth, and is in the cache until it is evicted (gone). */
const birth = i => Math.max(0, i - prompt + 1);
const happened = (at, s) => at !== -1 && at <= s;
const inCache = (head, i, s) => birth(i) <= s && !happened(head.gone[i], s);

/* The tokens that a head read at step s, and their number; null: its whole cache. */
const marks = new Map();
function reads(head, s) {
  if (!head.read) return null;
  if (!marks.has(head)) marks.set(head, []);
  const byStep = marks.get(head);
  if (!byStep[s]) {
    byStep[s] = {at: new Uint8Array(data.tokens.length), count: 0};
    for (let j = 0; j < head.read[s].length; j += 2) {
      const [lo, n] = head.read[s].slice(j, j + 2);
      byStep[s].at.fill(1, lo, lo + n);
      byStep[s].count += n;
    }
  }
  return byStep[s];
}
const isRead = (head, i, s) => !head.read || reads(head, s).at[i] === 1;
const PART = {clusters: "cluster", pages: "page"};
/* The selected head, if a single one is selected and it has clusters or pages. */
function selectedPartition() {
  if (state.view !== "read" || state.layer < 0 || state.head < 0) return null;
  const layer = layers[state.layer], head = layer.heads[state.head];
  return head.parts && {head, name: PART[layer.index]};
}

/* A view defines a level from 0 to 1 for every token in a head's cache, and what the levels mean.
   The shade of a token is the mean level over "of": all selected heads, or those that keep it. */
const VIEWS = {
  read: {
    name: "read tokens", least: "read by no head", most: "by every head", of: "all",
    did: "reads", done: "read", doing: "read",
    level: (head, i, s) => +isRead(head, i, s),
    tokens: (f, s) => f.head.read ? reads(f.head, s).count : layers[f.l].held[s],
    mass: (f, s) => (f.head.read_mass || f.head.mass)[s],
    lines: (found, i, s) => {
      const some = found.filter(f => f.kept && isRead(f.head, i, s));
      const lines = [["read by", `${some.length} of ${count(found.length, "head")}`]];
      const one = selectedPartition();
      if (!one) return lines;
      const steps = one.head.read.map((_, j) => j).filter(j => j && j >= birth(i) && isRead(one.head, i, j));
      lines.push(["at steps", steps.join(", ") || "none but the prompt's"]);
      const part = one.head.parts[i];
      const inside = one.head.parts.map((p, j) => j).filter(j => part >= 0 && one.head.parts[j] === part);
      const inNow = inside.filter(j => isRead(one.head, j, s)).length;
      lines.push([one.name, part < 0 || !happened(one.head.indexed[i], s) ? "in none yet: every step reads it"
        : `${part}: ${count(inside.length, "token")}, ${inNow} read now`]);
      return lines;
    },
  },
  kept: {
    name: "kept tokens", least: "kept by no head", most: "by every head", of: "all",
    level: () => 1,
    lines: () => [],
  },
  format: {
    name: "format", least: "exact", most: "packed, keys and values", of: "keeping",
    level: (head, i, s) => (happened(head.packed.keys[i], s) + happened(head.packed.values[i], s)) / 2,
    lines: (found, i, s) => ["keys", "values"].map(side => {
      const packed = found.filter(f => f.kept && happened(f.head.packed[side][i], s)).length;
      const exact = found.filter(f => f.kept).length - packed;
      const parts = [packed && `packed in ${packed}`, exact && `exact in ${exact}`];
      return [side, parts.filter(Boolean).join(", ") || "not kept"];
    }),
  },
};
const measure = {
  did: "keeps", done: "kept", doing: "kept",
  tokens: (f, s) => layers[f.l].held[s], mass: (f, s) => f.head.mass[s],
};
for (const view of Object.values(VIEWS)) Object.setPrototypeOf(view, measure);
const state = {view: data.views[0], layer: -1, head: -1, step: 0, token: 0};

/* The selected heads: [{l, h, head}]. */
function chosen(l = state.layer, h = state.head) {
  const found = [];
  layers.forEach((layer, a) => (l < 0 || a === l) && layer.heads.forEach((head, b) => {
    if (h < 0 || b === h) found.push({l: a, h: b, head});
  }));
  return found;
}
function shade(found, i) {
  const view = VIEWS[state.view];
  let keeping = 0, sum = 0;
  for (const f of found) {
    if (!inCache(f.head, i, state.step)) continue;
    keeping += 1;
    sum += view.level(f.head, i, state.step);
  }
  return {keeping, level: keeping ? sum / (view.of === "all" ? found.length : keeping) : 0};
}
const where = () => {
  const l = state.layer < 0 ? "all layers" : `layer ${layers[state.layer].number}`;
  return `${l}, ${state.head < 0 ? "all heads" : `head ${state.head}`}`;
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
  const found = chosen(), seen = prompt + state.step;
  let none = 0;
  spans.forEach((e, i) => {
    const born = birth(i) <= state.step;
    e.classList.toggle("later", !born);
    e.classList.toggle("born", state.step > 0 && birth(i) === state.step);
    const {keeping, level} = shade(found, i);
    if (born && !(state.view === "read" ? level : keeping)) none += 1;
    e.classList.toggle("gone", born && !keeping);
    e.style.setProperty("--p", (100 * level).toFixed(1));
  });
  document.querySelector("main").dataset.view = state.view;
  const view = VIEWS[state.view];
  $("least").textContent = view.least;
  $("most").textContent = view.most;
  $("view").value = state.view;
  $("layer").value = state.layer;
  $("head").value = state.head;
  $("step").value = state.step;
  $("when").textContent = `${state.step} of ${data.steps}: ${when(state.step)}`;
  $("step").setAttribute("aria-valuetext", $("when").textContent);
  $("back").disabled = state.step === 0;
  $("next").disabled = state.step === data.steps;
  summarize(found, seen, none);
  bars($("layers"), "layer", layers.map((layer, l) => ({
    label: layer.number, on: l === state.layer, pick: () => set({layer: l === state.layer ? -1 : l}),
    tokens: mean(chosen(l).map(f => view.tokens(f, state.step))), budget: layer.budget,
    mass: mean(chosen(l).map(f => view.mass(f, state.step))),
  })), seen);
  $("headtitle").textContent = "Heads, " + (state.layer < 0 ? "mean of all layers" : `layer ${layers[state.layer].number}`);
  bars($("heads"), "head", Array.from({length: heads}, (_, h) => ({
    label: h, on: h === state.head, pick: () => set({head: h === state.head ? -1 : h}),
    tokens: mean(chosen(state.layer, h).map(f => view.tokens(f, state.step))),
    mass: mean(chosen(state.layer, h).map(f => view.mass(f, state.step))),
  })), seen);
  parts();
  detail();
}
function summarize(found, seen, none) {
  const view = VIEWS[state.view], tokens = mean(found.map(f => view.tokens(f, state.step)));
  const at = $("said");
  at.textContent = `${when(state.step)}, ${where()}: a head ${view.did} `.replace(/^a/, "A");
  at.append(make("b", Math.round(tokens).toLocaleString("en")), ` of ${count(seen, "token")} (${percent(tokens / seen)}); they receive `);
  at.append(make("b", percent(mean(found.map(f => view.mass(f, state.step))))), ` of this step's exact attention. `);
  at.append(none ? `${count(none, "token")} ${none === 1 ? "is" : "are"} ${view.done} by none of these heads.` : `Every token is ${view.done} by at least one of them.`);
}
function bars(box, what, rows, seen) {
  const top = make("div", undefined, "row head");
  top.append(make("span", ""), make("span", `tokens ${VIEWS[state.view].done}`), make("span", `attention mass ${VIEWS[state.view].doing}`));
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
    const n = Math.round(r.tokens);
    e.append(make("span", r.label), bar(r.tokens / seen, "kept", r.budget / seen || 1), make("span", `${n}`), bar(r.mass, "mass"), make("span", percent(r.mass)));
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
/* The clusters or pages of one head, one cell each; darker if the step read more of it. */
function parts() {
  const box = $("parts"), one = selectedPartition();
  box.hidden = state.view !== "read";
  if (box.hidden) return;
  if (!one) {
    box.replaceChildren(make("h2", "Clusters and pages"), make("p", "Choose a layer and a head to see its clusters or pages; the first layers may have none.", "quiet"));
    return;
  }
  const {head, name} = one, size = [], got = [], first = [];
  let loose = 0;
  data.tokens.forEach((_, i) => {
    if (birth(i) > state.step) return;
    const p = happened(head.indexed[i], state.step) ? head.parts[i] : -1;
    if (p < 0) loose += inCache(head, i, state.step);
    else {
      size[p] = (size[p] || 0) + 1;
      got[p] = (got[p] || 0) + isRead(head, i, state.step);
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
    e.addEventListener("click", () => focusToken(first[p]));
    cells.append(e);
  });
  box.replaceChildren(
    make("h2", `${name[0].toUpperCase()}${name.slice(1)}s, layer ${layers[state.layer].number}, head ${state.head}`),
    make("p", `${some} of ${count(all, name)} read, in full or in part; ${count(loose, "token")} in none; every step reads these.`, "quiet"),
    cells);
}
function detail() {
  const i = state.token, box = $("token"), view = VIEWS[state.view], one = selectedPartition();
  const part = one && happened(one.head.indexed[i], state.step) ? one.head.parts[i] : -1;
  spans.forEach((e, j) => {
    e.classList.toggle("at", j === i);
    e.classList.toggle("mate", part >= 0 && one.head.parts[j] === part);
    e.tabIndex = j === i ? 0 : -1;
  });
  const found = chosen().map(f => ({...f, kept: inCache(f.head, i, state.step)}));
  const keeping = found.filter(f => f.kept);
  const title = make("h2");
  title.append(make("span", data.tokens[i] || "·", "piece"), ` token ${i}`);
  const dl = make("dl");
  const line = (name, value) => dl.append(make("dt", name), make("dd", value));
  line("origin", i < prompt ? "prompt" : `generated at step ${birth(i)}`);
  if (birth(i) > state.step) line("kept by", "not generated yet");
  else {
    line("kept by", `${keeping.length} of ${count(found.length, "head")} (${where()})`);
    if (keeping.length && keeping.length < found.length) line("which", which(keeping));
    view.lines(found, i, state.step).forEach(l => line(...l));
  }
  const scored = found.filter(f => f.head.scores);
  const first = score(scored.map(f => f.head.scores.first[i]));
  const last = score(scored.map(f => f.head.scores.last[i]));
  if (first !== null) line("score", `${first} (in the choice after the prompt)`);
  if (last !== null && last !== first) line("last score", `${last} (in the last choice)`);
  box.replaceChildren(title, dl, cells(i), make("p", "column: layer, row: head; filled: keeps it", "quiet"));
}
function which(keeping) {
  const some = [...new Set(keeping.map(f => f.l))];
  if (some.length > 8) return "the filled cells below";
  return some.map(l =>
    `layer ${layers[l].number}: ${keeping.filter(f => f.l === l).map(f => f.h).join(", ")}`).join("; ");
}
/* One cell for each head: a column is a layer, a row is a head. */
function cells(i) {
  const box = make("div", undefined, "grid"), view = VIEWS[state.view];
  box.style.gridTemplateColumns = `repeat(${layers.length}, auto)`;
  box.style.setProperty("--cell", `${Math.max(6, Math.min(16, Math.floor(330 / layers.length) - 2))}px`);
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", "which heads keep the token; a column is a layer, a row a head");
  for (let h = 0; h < heads; h++) layers.forEach((layer, l) => {
    const head = layer.heads[h], e = make("span"), here = inCache(head, i, state.step);
    if (here) {
      const level = view.level(head, i, state.step);
      e.dataset.p = level;
      e.style.setProperty("--p", 100 * level);
    }
    const s = head.scores && score([head.scores.last[i]]);
    const gone = happened(head.gone[i], state.step) ? `evicted ${when(head.gone[i])}` : here ? "kept" : "not generated yet";
    e.title = `layer ${layer.number}, head ${h}: ${gone}${s === null ? "" : `, last score ${s}`}`;
    const out = (state.layer >= 0 && l !== state.layer) || (state.head >= 0 && h !== state.head);
    if (out) e.className = "off";
    box.append(e);
  });
  return box;
}
function set(changes) { Object.assign(state, changes); draw(); }
function focusToken(i) {
  if (!(i >= 0) || i >= spans.length || birth(i) > state.step) return;
  state.token = i;
  detail();
}

$("recipe").textContent = data.recipe;
document.title = `${data.recipe} – kvloom inspect`;
const cut = data.text_tokens > prompt ? ` (the first of ${data.text_tokens.toLocaleString("en")})` : "";
$("about").textContent = [
  data.summary, data.model, data.source, `${count(prompt, "token")} of prompt${cut} and ${data.steps} generated`,
  `${count(layers.length, "layer")} × ${count(heads, "key/value head")}`,
  `keys ${data.formats.keys}; values ${data.formats.values}`,
  data.stock_layers.length && `layers ${data.stock_layers.join(", ")} are not compressed by kvloom`,
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
  ["A head", "is a key/value head; query heads that share keys and values count as one. Every head keeps its own selection of tokens."],
  ["Step", "0 is after the prompt was read; step s is after the s-th generated token was read. Generation is greedy, with this cache."],
  ["Shade", "the share of the selected heads that keep the token after the step. In the view of formats: the share of its keys and values that is packed, in the heads that keep it."],
  ["Read", "recipes with recall keep every token and read a part of them at each step: those that an index finds for the step's queries, and some that every step reads. The view of read tokens shows these in the shade, the bars and the mass. With one head selected, its clusters or pages are shown; pointing at a token underlines the tokens of the same cluster or page."],
  ["Tokens kept", "by each head of a layer, of all tokens so far. A stroke marks the layer's budget, if it has one. Recipes that evict only once, after the prompt, keep all later tokens in addition."],
  ["Attention mass kept", "the share of the step's exact attention on tokens kept after the step. Exact attention is the softmax over all tokens up to the query, with exact keys at their own positions and nothing evicted, for all queries of the prompt at step 0 and one query at a later step, of every query head. Over several layers and heads it is the mean. The prompt itself always attends to all its tokens."],
  ["Score", "the number by which the recipe selects tokens, if it uses scores. First: in the choice after the prompt. Last: in the last choice that included the token. “Protected” tokens are kept whatever their score."],
  ["Keys", "with a token focused, the arrow keys, Home and End move to other tokens; Tab moves to the bars, which select a layer or a head."],
]) $("terms").append(make("dt", name), make("dd", what));

$("view").addEventListener("change", e => set({view: e.target.value}));
$("layer").addEventListener("change", e => set({layer: +e.target.value}));
$("head").addEventListener("change", e => set({head: +e.target.value}));
$("step").addEventListener("input", e => set({step: +e.target.value}));
$("back").addEventListener("click", () => set({step: Math.max(0, state.step - 1)}));
$("next").addEventListener("click", () => set({step: Math.min(data.steps, state.step + 1)}));
const at = e => { const t = e.target.closest(".t[data-i]"); return t ? +t.dataset.i : -1; };
$("text").addEventListener("mouseover", e => focusToken(at(e)));
$("text").addEventListener("click", e => { const i = at(e); focusToken(i); if (i >= 0) spans[i].focus(); });
$("text").addEventListener("focusin", e => focusToken(at(e)));
$("text").addEventListener("keydown", e => {
  const last = prompt + state.step - 1;
  const to = {ArrowRight: state.token + 1, ArrowLeft: state.token - 1, ArrowDown: state.token + 10,
    ArrowUp: state.token - 10, Home: 0, End: last}[e.key];
  if (to === undefined) return;
  e.preventDefault();
  spans[Math.max(0, Math.min(last, to))].focus();
});
draw();
