/* Formats and the choice of the reader: what every part of the page uses. */
const space = (() => {
  const holder = document.createElement("template");
  holder.innerHTML = "<svg></svg>";
  return holder.content.firstChild.namespaceURI;
})();
const draw = (name, attributes, text) => {
  const e = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes || {})) e.setAttribute(key, value);
  if (text !== undefined) e.textContent = text;
  return e;
};

const SCORES = {
  perplexity: ["perplexity", "how many tokens the model hesitates between, on average; 1 is certainty"],
  nll: ["loss (nll)", "mean negative log-likelihood of the text that follows, in nats per token"],
  kl_mean: ["KL, mean", "how far the predicted probabilities are from those with the exact cache, in nats; 0 is equal"],
  kl_median: ["KL, median", "the KL divergence from the exact cache that half of the positions exceed, in nats"],
  kl_p999: ["KL, worst 0.1%", "the KL divergence from the exact cache that one position in 1,000 exceeds, in nats"],
  kl_slope: ["KL, slope", "how much the KL divergence from the exact cache grows in 1,000 tokens, in nats"],
  agreement: ["agreement", "share of positions where the most likely token is the same as with the exact cache"],
  diverged_at: ["tokens until divergence", "how many generated tokens are the same as with the exact cache"],
  repetition: ["repetition", "share of repeated sequences of four tokens in the generated text"],
  correct: ["correct", "share of the expected strings that the answer contains, 0 to 1"],
  followed: ["rules followed", "share of a prompt's rules that the answer follows, 0 to 1"],
  as_full: ["rules as full", "share of a prompt's rules with the same outcome as with the exact cache, 0 to 1"],
  kept_secret: ["secrets kept", "share of answers that do not contain the secret"],
  as_full_secret: ["secrets as full", "share of answers that contain the secret exactly if that with the exact cache does"],
};
const scoreName = score => (SCORES[score] || [score])[0];
const lower = (task, score) => task.scores[score] === "lower";
function scoreWords(task, score) {
  const what = SCORES[score] ? `: ${SCORES[score][1]}` : "";
  return `${scoreName(score)}${what}. ${lower(task, score) ? "Lower" : "Higher"} is better.`;
}
function number(score, x) {
  if (!has(x)) return "–";
  if (score === "diverged_at") return x.toFixed(1);
  if (score.startsWith("kl")) return x !== 0 && Math.abs(x) < 0.001 ? x.toExponential(1) : x === 0 ? "0" : x.toPrecision(3);
  return Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : x.toFixed(3);
}
const range = (score, i) => i && has(i[1]) ? `[${number(score, i[1])}, ${number(score, i[2])}]` : "";
const smaller = share => share > 0 ? `${(1 / share).toFixed(share > 0.1 ? 1 : 0)}×` : "–";
const unit = run => run.counts === "bytes" ? "bytes" : "tokens";
function bytes(n) {
  if (!has(n)) return "–";
  return n >= 2 ** 20 ? `${(n / 2 ** 20).toFixed(2)} MiB` : `${(n / 1024).toFixed(1)} KiB`;
}

/* A family is a recipe's name without its options; it has one colour and one shape everywhere. */
const family = recipe => recipe.split(":")[0];
const families = [...new Set(data.runs.flatMap(run => run.tasks.flatMap(t => t.rows.map(r => family(r.recipe)))))]
  .filter(name => name !== data.exact).sort();
const style = recipe => {
  const i = families.indexOf(family(recipe));
  return i < 0 ? {color: "var(--ink)", shape: 5} : {color: `var(--c${i % 8})`, shape: i % 5};
};
const SHAPES = [
  r => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
  r => `M${-.9 * r},${-.9 * r}h${1.8 * r}v${1.8 * r}h${-1.8 * r}z`,
  r => `M0,${-1.15 * r}L${1.1 * r},${.85 * r}H${-1.1 * r}z`,
  r => `M0,${-1.25 * r}L${1.25 * r},0L0,${1.25 * r}L${-1.25 * r},0z`,
  r => `M0,${1.15 * r}L${1.1 * r},${-.85 * r}H${-1.1 * r}z`,
  r => `M${-r},${-r}L${r},${r}M${r},${-r}L${-r},${r}`,
];
function marker(recipe, r, hollow) {
  const {color, shape} = style(recipe);
  const open = hollow || shape === 5;
  return draw("path", {d: SHAPES[shape](r), fill: open ? "var(--card)" : color, stroke: color, "stroke-width": open ? 2 : 1});
}
function icon(recipe, hollow) {
  const e = draw("svg", {width: 13, height: 13, viewBox: "-7 -7 14 14", "aria-hidden": "true"});
  e.append(marker(recipe, 5, hollow));
  return e;
}

/* Sizes: each recipe of a run belongs to the nearest of these shares of the exact bytes. */
const SIZES = [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 6, 1 / 8, 1 / 12, 1 / 16, 1 / 32];
function nearest(share) {
  if (!(share > 0)) return null;
  return SIZES.reduce((best, s) => Math.abs(Math.log(s / share)) < Math.abs(Math.log(best / share)) ? s : best);
}

const state = {
  runs: new Set([0]), task: null, score: null, size: "", hidden: new Set(), find: "",
  keep: 0.95, sort: {key: "share", down: false}, allMaps: false,
};
const chosenRuns = () => data.runs.filter((_, i) => state.runs.has(i));
const taskOf = (run, name = state.task) => run.tasks.find(t => t.name === name);
function visible(row) {
  if (state.hidden.has(family(row.recipe)) || !row.recipe.includes(state.find)) return false;
  return !state.size || family(row.recipe) === data.exact || String(nearest(row.share)) === state.size;
}
const rowsOf = task => task.rows.filter(visible);
const exactRow = task => task.rows.find(row => row.recipe === data.exact);
function facts(pairs) {
  const dl = make("dl", undefined, "facts");
  for (const [name, value] of pairs) if (has(value) && value !== "") dl.append(make("dt", name), make("dd", value));
  return dl;
}
/* The width of a panel's chart; on paper, that of a page. */
let printing = false;
const inner = e => printing ? (state.runs.size > 1 ? 470 : 960) : Math.max(300, e.clientWidth - 30);
function panel(run, ...more) {
  const e = make("div", undefined, "panel");
  const h = make("h3", run.name);
  if (run.counts !== "bytes") h.append(" ", make("span", "counts tokens, not bytes", "tokens"));
  e.append(h, ...more);
  return e;
}
