/* The first answer, and the charts of quality against bytes, speed and position. */

/* The share of the exact cache's score that a row keeps; null without a figure. */
function kept(task, row, score = task.main) {
  const exact = exactRow(task), mine = row.scores[score], whole = exact && exact.scores[score];
  if (!mine || !whole || !has(mine[0]) || !has(whole[0]) || mine[3] < whole[3]) return null;
  const [a, b] = lower(task, score) ? [whole[0], mine[0]] : [mine[0], whole[0]];
  return b > 0 ? a / b : null;
}
/* That share as text; without an interval, the text has the number of samples. */
function keeps(task, row) {
  const [, low, , samples] = row.scores[task.main];
  const few = has(low) ? "" : samples === 1 ? " on one sample" : ` on ${samples} samples`;
  return `keeps ${percent(kept(task, row))}${few}`;
}
function answers() {
  const table = make("table"), body = make("tbody"), runs = chosenRuns();
  const head = make("tr");
  for (const [text, cls] of [["Task"], ["Exact cache", "n"], ["Smallest cache that keeps it"], ["Share of the exact cache"], ["Its score", "n"], ["Next"]]) head.append(make("th", text, cls));
  for (const run of runs) for (const task of run.tasks) {
    const exact = exactRow(task), cell = (content, label, cls) => {
      const td = make("td", undefined, cls);
      if (label) td.dataset.label = label;
      td.append(...[content].flat());
      return td;
    };
    const good = task.rows.filter(r => r.recipe !== data.exact && has(r.share) && visible(r) && kept(task, r) >= state.keep)
      .sort((a, b) => a.share - b.share || kept(task, b) - kept(task, a));
    const others = [...new Map(good.map(r => [family(r.recipe), r]).reverse()).values()].filter(r => good[0] && family(r.recipe) !== family(good[0].recipe))
      .sort((a, b) => a.share - b.share).slice(0, 2);
    const tr = make("tr"), name = [make("b", task.name), make("div", scoreName(task.main), "quiet")];
    if (runs.length > 1) name.push(make("div", run.name, "quiet"));
    tr.append(cell(name), cell(number(task.main, exact && exact.scores[task.main] && exact.scores[task.main][0]), "exact cache", "n"));
    if (good.length) {
      const best = good[0], bar = make("span", undefined, "share"), fill = make("i");
      fill.style.setProperty("--w", 100 * Math.min(1, best.share));
      bar.append(fill);
      const size = [bar, make("span", percent(best.share), "big"), ` of the ${unit(run)}, ${smaller(best.share)} smaller`];
      const link = make("button", best.recipe, "open");
      link.type = "button";
      link.addEventListener("click", () => openSamples(run, task, best));
      const score = best.scores[task.main];
      tr.append(cell([icon(best.recipe, run.counts !== "bytes"), " ", link], "smallest"), cell(size, "share"),
        cell([number(task.main, score[0]), make("div", range(task.main, score), "ci"), make("div", keeps(task, best), "ci")], "its score", "n"),
        cell(others.length ? others.map(r => `${r.recipe} (${percent(r.share)})`).join(", ") : "–", "next", "quiet"));
    } else {
      const best = task.rows.filter(r => r.recipe !== data.exact && visible(r) && has(kept(task, r))).sort((a, b) => kept(task, b) - kept(task, a))[0];
      const td = cell(!exact ? "This run has no results of the exact cache." : best ? `None. The best, ${best.recipe}, ${keeps(task, best)} at ${percent(best.share)} of the ${unit(run)}.` : "None.");
      td.colSpan = 4;
      tr.append(td);
    }
    body.append(tr);
  }
  const thead = make("thead");
  thead.append(head);
  table.append(thead, body);
  $("answers").replaceChildren(table);
  const missing = runs.flatMap(run => run.tasks.flatMap(task => {
    const exact = exactRow(task), samples = r => r.scores[task.main] ? r.scores[task.main][3] : 0;
    return task.rows.filter(r => exact && visible(r) && samples(r) && samples(r) < samples(exact))
      .map(r => `${r.recipe} (${task.name}: ${samples(r)} of ${samples(exact)})`);
  }));
  if (missing.length) $("answers").append(make("p", `Not compared, because samples are missing: ${missing.join(", ")}. Run kvloom eval again.`, "read"));
  if (runs.some(r => r.counts !== "bytes")) $("answers").append(make("p", "kvpress counts tokens: its shares are shares of the tokens kept, not of the bytes.", "read"));
}

/* Draw a chart in each panel at the width of the panel. */
function inPanels(box, runs, build) {
  const shown = runs.map(run => ({run, e: panel(run)}));
  box.replaceChildren(...shown.map(s => s.e));
  for (const {run, e} of shown) {
    const made = build(run, inner(e), e);
    e.append(typeof made === "string" ? make("p", made) : made);
  }
}
function tipOf(run, task, row, score = state.score) {
  const i = row.scores[score], d = row.over_full[score];
  return [
    [scoreName(score), i && `${number(score, i[0])} ${range(score, i)}`],
    ["Δ full", d && `${d[0] > 0 ? "+" : ""}${number(score, d[0])} ${range(score, d)}`],
    [`share of ${unit(run)}`, has(row.share) ? `${percent(row.share)} (${smaller(row.share)} smaller)` : null],
    ["cache", has(row.kv_bytes) ? bytes(row.kv_bytes) : null],
    ["bits per value", has(row.bits_per_value) ? row.bits_per_value.toFixed(2) : null],
    ["tokens read", has(row.tokens_read) ? Math.round(row.tokens_read).toLocaleString("en") : null],
    ["decoding", has(row.decode_tokens_s) ? `${row.decode_tokens_s.toFixed(1)} tokens/s` : null],
    ["samples", row.samples || null],
    ["without figures", row.problems || null],
  ];
}
const SHARE_TICKS = [1, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8, 1 / 12, 1 / 16, 1 / 32, 1 / 64];
function scorePoints(run, task, x) {
  const score = state.score;
  return rowsOf(task).filter(r => has(x(r)) && x(r) > 0 && r.scores[score] && has(r.scores[score][0])).map(row => {
    const [y, low, high] = row.scores[score];
    return {x: x(row), y, low, high, recipe: row.recipe, title: row.recipe, tip: tipOf(run, task, row), row, pick: () => openSamples(run, task, row)};
  }).filter(p => !(state.logy && !(p.y > 0)));
}
function yAxis(task) {
  const down = lower(task, state.score);
  return {log: state.logy, flip: down, label: `${scoreName(state.score)} (${down ? "lower is better, axis reversed" : "higher is better"})`};
}
function pareto() {
  inPanels($("pareto"), chosenRuns(), (run, width, e) => {
    const task = taskOf(run);
    if (!task || !task.scores[state.score]) return "This run has no such score.";
    const tokens = run.counts !== "bytes";
    if (tokens) e.append(make("p", "kvpress' compression ratio counts tokens. These hollow points show the share of tokens kept; their bytes are not known, so they have no front."));
    const points = scorePoints(run, task, r => r.share);
    if (!points.length) return "None of the chosen recipes has this figure.";
    const front = (task.fronts[state.score] || []).map(i => points.find(p => p.row === task.rows[i])).filter(Boolean);
    points.filter(p => p.recipe === data.exact).forEach(p => { p.named = true; });
    const x = {log: state.logx, label: tokens ? "share of the tokens kept (not bytes)" : "share of the exact cache's bytes",
      ticks: state.logx ? SHARE_TICKS : undefined, format: t => [`${Number((100 * t).toPrecision(3))}%`, state.logx && t < 1 ? `1/${Math.round(1 / t)}` : ""]};
    return pointChart(width, points, x, yAxis(task), {front, join: true, hollow: tokens,
      title: `${scoreName(state.score)} by ${x.label}, ${run.name}; the arrow keys move between recipes`});
  });
}
function speed() {
  const runs = chosenRuns().filter(run => taskOf(run) && taskOf(run).rows.some(r => has(r.decode_tokens_s)));
  $("speed").hidden = !runs.length;
  inPanels($("speeds"), runs, (run, width) => {
    const task = taskOf(run);
    const points = task.scores[state.score] ? scorePoints(run, task, r => r.decode_tokens_s) : [];
    if (!points.length) return "None of the chosen recipes has both figures.";
    return pointChart(width, points, {label: "tokens decoded per second", log: false}, yAxis(task),
      {title: `${scoreName(state.score)} by speed, ${run.name}; the arrow keys move between recipes`});
  });
}
/* What a curve is called, and its words. */
const CURVES = {
  kl: ["KL divergence", "the KL divergence from the exact cache: how far the predicted probabilities are from those with the exact cache, in nats. 0 is equal"],
  kl_mean: ["KL divergence by block", "the KL divergence from the exact cache in each block of positions, in nats"],
  kl_p999: ["KL divergence by block, worst 0.1%", "the KL divergence from the exact cache that one position in 1,000 of each block exceeds, in nats"],
  agreement: ["agreement", "the share of samples in which the most likely token is the same as with the exact cache"],
  kv_mib: ["cache, MiB", "the size of the cache at the end of each block of positions, in MiB"],
};
const curveName = name => (CURVES[name] || [name])[0];
const MOST_LINES = 16;
/* The row with the fewest bytes of each family. */
function smallest(rows) {
  const found = new Map();
  for (const row of rows) {
    const other = found.get(family(row.recipe));
    if (!other || row.share < other.share) found.set(family(row.recipe), row);
  }
  return [...found.values()];
}
function curveList() {
  const found = new Map();
  for (const run of chosenRuns()) for (const task of run.tasks) for (const row of task.rows) {
    for (const name of Object.keys(row.curves)) found.set(`${task.name}/${name}`, `${task.name}: ${curveName(name)}`);
  }
  return [...found];
}
function divergence() {
  const list = curveList();
  $("divergence").hidden = !list.length;
  if (!list.length) return;
  options($("curve"), list, $("curve").value);
  const [taskName, name] = $("curve").value.split("/");
  $("curve-words").replaceChildren(make("b", "How to read: "), `the curve is the mean over samples of ${(CURVES[name] || [name, name])[1]}. ` +
    `Position 0 is the first token after the compressed text.${name.startsWith("kl") ? " A rising curve means that errors add up." : ""}`);
  const runs = chosenRuns().filter(run => taskOf(run, taskName));
  inPanels($("curves"), runs, (run, width, e) => {
    const all = rowsOf(taskOf(run, taskName)).filter(r => r.curves[name] && (r.recipe !== data.exact || name === "kv_mib"));
    const rows = all.length > MOST_LINES ? smallest(all) : all;
    if (rows.length < all.length) e.append(make("p", `The smallest of each recipe, ${rows.length} of ${all.length} lines; choose a size above to see others.`));
    const log = $("logd").checked;
    const lines = rows.map(row => {
      const [xs, ys] = row.curves[name], all = ys.filter(has);
      return {xs, ys, recipe: row.recipe, title: row.recipe, tip: [["mean", number("kl", mean(all))], ["at the end", number("kl", all[all.length - 1])],
        [`share of ${unit(run)}`, percent(row.share)]]};
    }).filter(l => l.ys.some(v => has(v) && (!log || v > 0)));
    if (!lines.length) return "None of the chosen recipes has this curve.";
    return lineChart(width, lines, {label: "tokens after the compressed text"}, {label: curveName(name) + (name.startsWith("kl") ? ", nats" : ""), log},
      `${name} by position, ${run.name}; the arrow keys move between recipes`);
  });
}
