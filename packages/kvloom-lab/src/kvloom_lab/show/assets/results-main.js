/* The controls, and the first drawing. */
function toggles(box, items) {
  box.replaceChildren(...items.map(({text, on, recipe, act}) => {
    const e = make("button", undefined);
    e.type = "button";
    if (recipe) e.append(icon(recipe));
    e.append(text);
    e.setAttribute("aria-pressed", on);
    e.addEventListener("click", () => {
      const at = [...box.children].indexOf(e);
      act();
      box.children[at].focus();
    });
    return e;
  }));
}
function controls() {
  const runs = chosenRuns(), tasks = [...new Set(runs.flatMap(run => run.tasks.map(t => t.name)))];
  if (!tasks.includes(state.task)) state.task = tasks[0];
  options($("task"), tasks.map(t => [t, t]), state.task);
  const of = runs.map(run => taskOf(run)).filter(Boolean);
  const scores = [...new Set(of.flatMap(t => Object.keys(t.scores)))];
  if (!scores.includes(state.score)) {
    state.score = of[0].main;
    state.logy = lower(of[0], state.score) && of[0].rows.every(r => !r.scores[state.score] || r.scores[state.score][0] > 0);
  }
  options($("score"), scores.map(s => [s, scoreName(s)]), state.score);
  $("logy").checked = state.logy;
  const sizes = [...new Set(runs.flatMap(run => run.tasks.flatMap(t => t.rows.filter(r => r.recipe !== data.exact).map(r => nearest(r.share)))))].filter(has).sort((a, b) => b - a);
  $("sizebox").hidden = sizes.length < 2;
  if (!sizes.map(String).includes(state.size)) state.size = "";
  options($("size"), [["", "all"], ...sizes.map(s => [String(s), s === 1 ? "about 1" : `about 1/${Math.round(1 / s)}`])], state.size);
  toggles($("runs"), data.runs.map((run, i) => ({
    text: run.name, on: state.runs.has(i),
    act: () => {
      if (state.runs.has(i) && state.runs.size > 1) state.runs.delete(i);
      else state.runs.add(i);
      refresh();
    },
  })));
  $("runbox").hidden = data.runs.length < 2;
  const present = [...new Set(of.flatMap(t => t.rows.map(r => family(r.recipe))))];
  toggles($("families"), [data.exact, ...families].filter(f => present.includes(f)).map(f => ({
    text: f, on: !state.hidden.has(f), recipe: f,
    act: () => { state.hidden.has(f) ? state.hidden.delete(f) : state.hidden.add(f); refresh(); },
  })));
  const rows = of.flatMap(t => t.rows);
  $("shown").textContent = `${rows.filter(visible).length} of ${rows.length}`;
  const task = of[0];
  $("task-words").textContent = `${task.about || `Task ${task.name}.`} ${scoreWords(of.find(t => t.scores[state.score]) || task, state.score).replace(/^./, c => c.toUpperCase())}`;
  const about = [...new Set(runs.map(r => r.model.name).filter(Boolean))].join(", ");
  const recipes = new Set(runs.flatMap(run => run.tasks.flatMap(t => t.rows.map(r => r.recipe))));
  $("about").textContent = [about, count(recipes.size, "recipe"), count(tasks.length, "task"),
    ...new Set(runs.map(r => r.environment.date && `measured ${r.environment.date.slice(0, 10)}`).filter(Boolean)), `kvloom ${data.kvloom}`].join(" · ");
}
const charts = () => { pareto(); divergence(); speed(); };
function refresh() {
  controls();
  answers();
  charts();
  maps();
  figures();
  sampleControls();
  environment();
}
const on = (id, event, act) => $(id).addEventListener(event, act);
on("task", "change", e => { state.task = e.target.value; state.score = null; refresh(); });
on("score", "change", e => { state.score = e.target.value; state.logy = false; refresh(); });
on("size", "change", e => { state.size = e.target.value; refresh(); });
on("find", "input", e => { state.find = e.target.value; refresh(); });
on("everything", "click", () => { state.hidden.clear(); state.find = $("find").value = ""; refresh(); });
on("nothing", "click", () => { families.concat(data.exact).forEach(f => state.hidden.add(f)); refresh(); });
on("keep", "change", e => { state.keep = +e.target.value; answers(); });
on("logx", "change", e => { state.logx = e.target.checked; pareto(); });
on("logy", "change", e => { state.logy = e.target.checked; pareto(); speed(); });
on("logd", "change", divergence);
on("curve", "change", divergence);
on("variant", "change", maps);
on("samplerun", "change", e => { view.run = data.runs[+e.target.value]; sampleControls(); });
for (const id of ["a", "b", "which"]) on(id, "change", () => { view.page = 0; list(); });
on("theme", "change", e => {
  document.documentElement.dataset.theme = e.target.value;
  try { localStorage.setItem("kvloom-theme", e.target.value); } catch { /* the browser keeps nothing of local files */ }
});
document.addEventListener("keydown", e => { if (e.key === "Escape") $("filter").open = false; });
document.addEventListener("click", e => { if (!$("filter").contains(e.target) && document.contains(e.target)) $("filter").open = false; });
let waiting;
let drawnAt = innerWidth;
addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { if (innerWidth !== drawnAt) { drawnAt = innerWidth; charts(); } }, 120);
});
for (const [event, now] of [["beforeprint", true], ["afterprint", false]]) {
  addEventListener(event, () => { printing = now; charts(); });
}
addEventListener("scroll", placeTip, {passive: true});
let theme = "";
try { theme = localStorage.getItem("kvloom-theme") || ""; } catch { /* see above */ }
$("theme").value = document.documentElement.dataset.theme = theme;
state.logx = true;
if (data.runs.length === 2) state.runs.add(1);
document.title = `${data.runs.map(run => run.name).join(", ")} – kvloom report`;
refresh();
