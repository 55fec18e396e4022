/* The table of all figures, and the conditions of the runs. */
function columns(runs, tasks) {
  const scores = [...new Set(tasks.flatMap(t => Object.keys(t.scores)))];
  const list = [
    {key: "recipe", text: "Recipe", value: r => r.row.recipe},
    {key: "share", text: runs.every(r => r.counts === "bytes") ? "Share of bytes" : "Share", n: true, value: r => r.row.share},
    {key: "bytes", text: "Cache", n: true, value: r => r.row.kv_bytes, show: r => bytes(r.row.kv_bytes)},
    {key: "bits", text: "Bits per value", n: true, value: r => r.row.bits_per_value, show: r => has(r.row.bits_per_value) ? r.row.bits_per_value.toFixed(2) : "–"},
    {key: "read", text: "Tokens read", n: true, value: r => r.row.tokens_read, show: r => has(r.row.tokens_read) ? Math.round(r.row.tokens_read).toLocaleString("en") : "–"},
  ];
  for (const s of scores) {
    list.push({key: s, text: scoreName(s), n: true, score: s, value: r => (r.row.scores[s] || [null])[0]});
  }
  list.push(
    {key: "over", text: `Δ full, ${scoreName(state.score)}`, n: true, value: r => (r.row.over_full[state.score] || [null])[0], over: state.score},
    {key: "speed", text: "Decoding, tokens/s", n: true, value: r => r.row.decode_tokens_s, show: r => has(r.row.decode_tokens_s) ? r.row.decode_tokens_s.toFixed(1) : "–"},
    {key: "prefill", text: "Prefill, s", n: true, value: r => r.row.prefill_s, show: r => has(r.row.prefill_s) ? r.row.prefill_s.toFixed(2) : "–"},
    {key: "samples", text: "Samples", n: true, value: r => r.row.samples, show: r => r.row.samples},
  );
  if (runs.length > 1) list.splice(1, 0, {key: "run", text: "Run", value: r => r.run.name, show: r => r.run.name});
  return list.filter(c => ["recipe", "share", "samples"].includes(c.key) || tasks.some(t => t.rows.some(row => has(c.value({row, run: {name: ""}})))));
}
function figures() {
  const runs = chosenRuns().filter(run => taskOf(run)), tasks = runs.map(run => taskOf(run));
  const rows = runs.flatMap(run => {
    const task = taskOf(run), front = new Set((task.fronts[state.score] || []).map(i => task.rows[i]));
    return rowsOf(task).filter(row => row.samples || Object.keys(row.scores).length).map(row => ({run, task, row, front: front.has(row)}));
  });
  const list = columns(runs, tasks), by = list.find(c => c.key === state.sort.key) || list[0], way = state.sort.down ? -1 : 1;
  rows.sort((a, b) => {
    const [x, y] = [by.value(a), by.value(b)];
    if (!has(x) || !has(y)) return has(y) - has(x);
    return way * (typeof x === "string" ? x.localeCompare(y, "en", {numeric: true}) : x - y);
  });
  const table = make("table"), head = make("tr"), body = make("tbody"), thead = make("thead");
  for (const c of list) {
    const th = make("th", undefined, c.n ? "n" : ""), button = make("button", c.text);
    button.type = "button";
    if (c === by) {
      th.setAttribute("aria-sort", state.sort.down ? "descending" : "ascending");
      button.append(state.sort.down ? " ▾" : " ▴");
    }
    button.dataset.key = c.key;
    button.addEventListener("click", () => {
      state.sort = {key: c.key, down: state.sort.key === c.key ? !state.sort.down : false};
      figures();
      $("table").querySelector(`button[data-key="${CSS.escape(c.key)}"]`).focus();
    });
    th.append(button);
    head.append(th);
  }
  for (const r of rows) {
    const tr = make("tr");
    for (const c of list) {
      const td = make("td", undefined, c.n ? "n" : "");
      if (c.key === "recipe") {
        const open = make("button", r.row.recipe, "open");
        open.type = "button";
        open.addEventListener("click", () => openSamples(r.run, r.task, r.row));
        td.classList.add("recipe");
        td.append(icon(r.row.recipe, r.run.counts !== "bytes"), " ", open);
        if (r.front) {
          const dot = make("span", " ●");
          dot.title = "on the Pareto front";
          td.append(dot);
        }
      } else if (c.key === "share") {
        td.append(percent(r.row.share));
        if (r.run.counts !== "bytes") td.append(" ", make("span", "tokens", "tokens"));
      } else if (c.score || c.over) {
        const s = c.score || c.over, i = (c.score ? r.row.scores : r.row.over_full)[s];
        td.append(i ? `${c.over && i[0] > 0 ? "+" : ""}${number(s, i[0])}` : "–", make("div", range(s, i), "ci"));
        if (c.over && i) td.append(make("div", `${i[6]} +${i[4]} −${i[5]}`, "ci"));
      } else td.append(c.show(r));
      tr.append(td);
    }
    body.append(tr);
  }
  thead.append(head);
  table.append(thead, body);
  $("table").replaceChildren(table);
  problems(runs);
}
/* Recipes without figures, and why. */
function problems(runs) {
  const found = runs.flatMap(run => taskOf(run).rows.filter(r => r.problems && visible(r)).map(r =>
    [r.recipe, `${r.samples ? `${count(r.problems, "sample")} without figures` : "no figures"}: ${r.problem}`]));
  $("problems").replaceChildren(...found.length ? [make("h3", "Recipes that could not run"), facts(found)] : []);
}
const TERMS = [
  ["Recipe", "a method with its options that stores the KV cache in fewer bytes: it quantizes (fewer bits per number), evicts (drops tokens for good), or recalls (keeps all, reads some)."],
  ["Share of bytes", "the bytes of the cache's tensors after a sample, over the bytes of an exact cache of the same tokens. Metadata, such as scales and indexes, count."],
  ["Tokens read", "the tokens of each context that the last step read in a layer, on average; of recipes that recall."],
  ["Share of tokens", "what kvpress reports as 1 − compression ratio. It counts tokens, not bytes, and says nothing about formats. Such points are hollow."],
  ["Pareto front", "the recipes for which no other one has at most their bytes and at least their score. The front is of all recipes of the run, hidden ones too."],
  ["95% interval", "bootstrap over contexts, each with all its questions: expanded percentiles of 2,000 resamples with a fixed seed. If all contexts agree, the interval has no width; that is no certainty about other texts. Fewer than six contexts have none."],
  ["Δ full", "the mean difference from the exact cache on the same samples, with its own interval. \"equal\": chance explains the difference (sign-flip test over contexts); \"too few\": below six contexts."],
  ["KL divergence", "the Kullback-Leibler divergence of the recipe's next-token probabilities from those of the exact cache, in nats (natural logarithm)."],
  ["Keys", "Tab moves between controls and charts; in a chart the arrow keys, Home and End move between recipes, and Enter opens the samples. Escape closes a sample."],
];
function flat(value, name = "") {
  if (value !== null && typeof value === "object" && !Array.isArray(value)) {
    return Object.entries(value).flatMap(([key, inner]) => flat(inner, name ? `${name} ${key}` : key));
  }
  const text = x => typeof x === "number" ? String(Number(x.toPrecision(6))) : String(x);
  const list = Array.isArray(value) && value.length > 20 ? `${value.length}, see the figures` : null;
  return [[name.replaceAll("_", " "), list || (Array.isArray(value) ? value.map(text).join(", ") : has(value) ? text(value) : "")]];
}
function environment() {
  $("environment").replaceChildren(...chosenRuns().map(run => {
    const part = (title, value) => Object.keys(value || {}).length ? [make("h4", title), facts(flat(value))] : [];
    return panel(run, ...part("Model", run.model), ...part("Machine and versions", run.environment), ...part("Settings", run.settings));
  }));
  $("terms").replaceChildren(...TERMS.flatMap(([name, what]) => [make("dt", name), make("dd", what)]));
}
