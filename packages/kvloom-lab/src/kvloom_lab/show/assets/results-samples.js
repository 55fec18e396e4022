/* Samples: the list, and one sample with two answers token by token. */
const PAGE = 15, unpacked = new Map();
const view = {run: null, task: null, page: 0, open: null};

/* The samples of a chunk; the last few stay unpacked. */
function unpack(id) {
  if (!unpacked.has(id)) {
    const raw = Uint8Array.from(atob($(`chunk${id}`).textContent), c => c.charCodeAt(0));
    const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("gzip"));
    unpacked.set(id, new Response(stream).json());
    if (unpacked.size > 6) unpacked.delete(unpacked.keys().next().value);
  }
  return unpacked.get(id);
}
async function sampleText(task, i) {
  const [first, id] = task.chunks.filter(([start]) => start <= i).pop();
  return (await unpack(id))[i - first];
}
/* A recipe's answer to a sample: {answer, tokens} or {problem}; null without one. */
function answerOf(sample, task, recipe) {
  const at = sample.which[task.rows.findIndex(r => r.recipe === recipe)];
  if (typeof at === "string") return {problem: at};
  if (!(at >= 0)) return null;
  const [answer, tokens] = sample.texts[at];
  return {answer: answer || tokens.join(""), tokens};
}
const valueOf = (task, recipe, i) => { const row = task.rows.find(r => r.recipe === recipe); return row ? row.values[i] : null; };
const excerpt = (text, n) => text.length > n ? `${text.slice(0, n)}…` : text;

function matching(task, a, b) {
  const down = lower(task, task.per_sample);
  return task.samples.map((_, i) => i).filter(i => {
    const [x, y] = [valueOf(task, a, i), valueOf(task, b, i)], which = $("which").value;
    if (which === "all") return true;
    if (which === "missing") return !has(x) || !has(y);
    return has(x) && has(y) && (which === "differ" ? x !== y : down ? x > y : x < y);
  });
}
function sampleControls() {
  const runs = chosenRuns().filter(run => taskOf(run) && taskOf(run).chunks.length);
  $("samples").hidden = !runs.length;
  if (!runs.length) return;
  if (!runs.includes(view.run)) view.run = runs[0];
  view.task = taskOf(view.run);
  $("samplerunbox").hidden = runs.length < 2;
  options($("samplerun"), runs.map(run => [data.runs.indexOf(run), run.name]), data.runs.indexOf(view.run));
  const recipes = view.task.rows.map(r => [r.recipe, `${r.recipe}${has(r.share) ? ` (${percent(r.share)})` : ""}`]);
  const first = view.task.rows.filter(r => r.recipe !== data.exact && visible(r)).sort((x, y) => (x.share ?? 9) - (y.share ?? 9))[0];
  const keep = (id, other) => options($(id), recipes, view.task.rows.some(r => r.recipe === $(id).value) ? $(id).value : other);
  keep("a", first ? first.recipe : recipes[0][0]);
  keep("b", exactRow(view.task) ? data.exact : recipes[recipes.length - 1][0]);
  view.page = 0;
  list();
}
async function list() {
  const {task} = view, a = $("a").value, b = $("b").value, found = matching(task, a, b);
  const pages = Math.max(1, Math.ceil(found.length / PAGE));
  view.page = Math.min(view.page, pages - 1);
  const some = found.slice(view.page * PAGE, view.page * PAGE + PAGE);
  const table = make("table"), thead = make("thead"), head = make("tr"), body = make("tbody");
  for (const text of ["Sample", "Question", "Reference"]) head.append(make("th", text));
  for (const [letter, recipe] of [["A", a], ["B", b]]) head.append(make("th", `${letter}: ${scoreName(task.per_sample)}`, "n"), make("th", `${letter}: ${recipe}`));
  const rows = some.map(i => {
    const tr = make("tr"), open = make("button", task.samples[i], "open"), td = make("td");
    open.type = "button";
    open.addEventListener("click", () => openSample(i));
    td.append(open);
    for (const [name, values] of Object.entries(task.fields)) {
      if (has(values[i]) && values[i] !== "") td.append(make("div", `${name} ${values[i]}`, "quiet"));
    }
    const cells = [make("td", "…", "text"), make("td", "…", "text"), make("td", number(task.per_sample, valueOf(task, a, i)), "n"), make("td", "…", "text"),
      make("td", number(task.per_sample, valueOf(task, b, i)), "n"), make("td", "…", "text")];
    tr.append(td, ...cells);
    body.append(tr);
    return [i, cells];
  });
  thead.append(head);
  table.append(thead, body);
  $("list").replaceChildren(some.length ? table : make("p", "No sample matches.", "quiet"));
  const step = (text, label, by) => {
    const e = make("button", text);
    e.type = "button";
    e.setAttribute("aria-label", label);
    e.disabled = view.page + by < 0 || view.page + by >= pages;
    e.addEventListener("click", () => { view.page += by; list(); });
    return e;
  };
  $("pager").replaceChildren(step("‹", "previous page", -1), make("span", `page ${view.page + 1} of ${pages}, ${count(found.length, "sample")}`), step("›", "next page", 1));
  for (const [i, cells] of rows) {
    const sample = await sampleText(task, i);
    const text = recipe => { const x = answerOf(sample, task, recipe); return x ? x.problem || x.answer : "–"; };
    cells[0].textContent = excerpt(sample.question || "–", 140);
    cells[1].textContent = excerpt(sample.reference || "–", 120);
    cells[3].textContent = excerpt(text(a), 140);
    cells[5].textContent = excerpt(text(b), 140);
  }
}
/* Show the samples of a recipe, from a chart or a table. */
function openSamples(run, task, row) {
  hideTip();
  view.run = run;
  if (task.name !== state.task) {
    state.task = task.name;
    refresh();
  } else sampleControls();
  $("a").value = row.recipe;
  list();
  $("samples").scrollIntoView();
  $("a").focus({preventScroll: true});
}

function passage(parts, cut) {
  const e = make("div", parts[0], "passage context");
  e.tabIndex = 0;
  if (parts.length > 1) e.append(make("span", `${cut.toLocaleString("en")} characters are left out of this page here.`, "gap"), parts[1]);
  return e;
}
/* Two answers, position by position. Tokens that differ are marked; words, if there are no tokens. */
function compare(task, sample, a, b) {
  const pair = [a, b].map(recipe => answerOf(sample, task, recipe));
  const exact = pair.every(x => x && !x.problem && x.tokens.length);
  const pieces = pair.map(x => !x || x.problem ? [] : exact ? x.tokens : x.answer.match(/\s*\S+|\s+$/g) || []);
  const what = exact ? "token" : "word", most = Math.max(...pieces.map(p => p.length));
  const same = i => pieces[0][i] === pieces[1][i];
  let first = 0, equal = 0;
  while (first < most && same(first)) first++;
  for (let i = 0; i < most; i++) equal += same(i);
  const box = make("div", undefined, "pair");
  [["A", a], ["B", b]].forEach(([letter, recipe], side) => {
    const e = make("div"), title = make("h3"), text = make("div", undefined, "passage tokens-of");
    title.append(`${letter}: `, icon(recipe), ` ${recipe}, ${scoreName(task.per_sample)} ${number(task.per_sample, valueOf(task, recipe, view.open))}`);
    text.tabIndex = 0;
    text.dataset.side = letter;
    pieces[side].forEach((piece, i) => {
      const span = make("span", undefined, same(i) ? "" : i === first ? "d first" : "d");
      span.title = `${what} ${i}`;
      span.append(...piece.split(/(\n)/).flatMap(x => x === "\n" ? ["⏎", "\n"] : [x]).filter(Boolean));
      if (piece === "") span.append("·");
      text.append(span);
    });
    if (!pieces[side].length) text.append(make("i", !pair[side] ? "no answer in the results" : pair[side].problem || "an empty answer"));
    e.append(title, text);
    box.append(e);
  });
  let words = `A and B are equal: ${count(most, what)}.`;
  if (!most) words = "There are no answers to compare.";
  else if (first < most) words = `The first difference is at ${what} ${first}; ${equal.toLocaleString("en")} of ${count(most, "position")} agree. Differences are underlined, the first is framed.`;
  return [make("p", words, "read"), box];
}
async function openSample(i) {
  view.open = i;
  const {task} = view, sample = await sampleText(task, i), dialog = $("sample");
  const a = $("a").value, b = $("b").value;
  const top = make("div", undefined, "title"), title = make("h2", `${task.name}: ${task.samples[i]}`);
  title.id = "sample-title";
  title.tabIndex = -1;
  const button = (text, act, off) => {
    const e = make("button", text);
    e.type = "button";
    e.disabled = Boolean(off);
    e.addEventListener("click", act);
    return e;
  };
  top.append(title, button("‹ previous", () => openSample(i - 1), i === 0), button("next ›", () => openSample(i + 1), i === task.samples.length - 1),
    button("Close", () => dialog.close()));
  const parts = [top, facts(flat(sample.fields))];
  const part = (name, ...content) => parts.push(make("h3", name), ...content);
  part("Context (compressed)", passage(sample.context, sample.cut));
  if (sample.question) part("Question", passage([sample.question], 0));
  if (sample.reference) part("Reference", passage([sample.reference], 0));
  part(task.name === "perplexity" ? "Most likely token at each position" : "Answers", ...compare(task, sample, a, b));
  const table = make("table"), body = make("tbody");
  task.rows.forEach(row => {
    const x = answerOf(sample, task, row.recipe), tr = make("tr"), td = make("td");
    const pick = button(row.recipe, () => { $("b").value = row.recipe; list(); openSample(i); });
    pick.className = "open";
    pick.title = "compare A with this recipe";
    td.className = "recipe";
    td.append(icon(row.recipe, view.run.counts !== "bytes"), " ", pick);
    tr.append(td, make("td", percent(row.share), "n"), make("td", number(task.per_sample, row.values[i]), "n"), make("td", x ? x.problem || excerpt(x.answer, 300) : "–", "text"));
    body.append(tr);
  });
  const thead = make("thead"), head = make("tr");
  head.append(make("th", "Recipe"), make("th", `Share of ${unit(view.run)}`, "n"), make("th", scoreName(task.per_sample), "n"), make("th", "Answer"));
  thead.append(head);
  table.append(thead, body);
  const scroll = make("div", undefined, "scroll");
  scroll.append(table);
  part("All recipes on this sample (choose one to compare it with A)", scroll);
  dialog.replaceChildren(...parts);
  if (!dialog.open) dialog.showModal();
  title.focus();
  dialog.scrollTop = 0;
}
