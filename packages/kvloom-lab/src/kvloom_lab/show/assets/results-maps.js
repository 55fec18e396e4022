/* Heatmaps of retrieval: one per recipe, length by depth. */
const FIRST_MAPS = 12;

function depthTask(run) {
  return run.tasks.find(t => t.fields.depth && t.fields.length && t.rows.some(r => r.values.some(has)));
}
/* The mean value of each cell: rows are depths, columns are lengths. */
function grid(task, row, variant) {
  const {length, depth, variant: kinds} = task.fields, cells = new Map();
  row.values.forEach((value, i) => {
    if (!has(value) || !has(depth[i]) || (variant && String(kinds[i]) !== variant)) return;
    const key = `${length[i]}/${depth[i]}`;
    cells.set(key, [...(cells.get(key) || []), value]);
  });
  const sorted = xs => [...new Set(xs.filter(has))].sort((a, b) => a - b);
  return {lengths: sorted(length), depths: sorted(depth), at: (l, d) => cells.get(`${l}/${d}`) || []};
}
function heatmap(run, task, row, variant) {
  const e = make("div", undefined, "panel heat"), title = make("h3");
  title.append(icon(row.recipe, run.counts !== "bytes"), " ", row.recipe);
  const {lengths, depths, at} = grid(task, row, variant);
  const table = make("table"), top = make("tr"), all = [];
  table.setAttribute("aria-label", `${row.recipe}: percent of correct answers by length and depth`);
  top.append(make("th", ""), ...lengths.map(l => {
    const th = make("th", l >= 1000 ? `${Number((l / 1000).toPrecision(2))}k` : l);
    th.scope = "col";
    return th;
  }));
  table.append(top);
  for (const d of depths) {
    const tr = make("tr"), th = make("th", percent(d, 0));
    th.scope = "row";
    tr.append(th);
    for (const l of lengths) {
      const values = at(l, d), value = mean(values), td = make("td", has(value) ? Math.round(100 * value) : "");
      all.push(...values);
      if (has(value)) {
        td.style.setProperty("--v", 100 * value);
        td.classList.toggle("dark", value > .55);
        td.title = `${l} tokens, depth ${percent(d, 0)}: ${percent(value)} correct (${count(values.length, "sample")})`;
      }
      tr.append(td);
    }
    table.append(tr);
  }
  e.append(title, make("p", `${percent(row.share)} of the ${unit(run)} · ${percent(mean(all))} correct`), table);
  return e;
}
function maps() {
  const runs = chosenRuns().filter(depthTask);
  $("maps").hidden = !runs.length;
  if (!runs.length) return;
  const kinds = [...new Set(runs.flatMap(run => depthTask(run).fields.variant || []).filter(has))].map(String);
  $("variantbox").hidden = kinds.length < 2;
  options($("variant"), [["", "all"], ...kinds.map(k => [k, k])], $("variant").value);
  const variant = kinds.length < 2 ? "" : $("variant").value;
  $("heatmaps").replaceChildren(...runs.flatMap(run => {
    const task = depthTask(run), box = make("div", undefined, "heats");
    const rows = rowsOf(task).filter(r => r.samples).sort((a, b) => (b.recipe === data.exact) - (a.recipe === data.exact) || (a.share ?? 9) - (b.share ?? 9) || a.recipe.localeCompare(b.recipe));
    const some = state.allMaps ? rows : spread(rows, FIRST_MAPS);
    box.append(...some.map(row => heatmap(run, task, row, variant)));
    const parts = [box];
    if (runs.length > 1) parts.unshift(make("h3", run.name, "run"));
    if (some.length < rows.length) {
      const more = make("button", `Show all ${rows.length} maps`);
      more.type = "button";
      more.addEventListener("click", () => { state.allMaps = true; maps(); });
      parts.push(more);
    }
    return parts;
  }));
}
/* The first row, and rows of as many families as possible. */
function spread(rows, most) {
  const seen = new Map(), rank = new Map();
  for (const row of rows) {
    const n = seen.get(family(row.recipe)) || 0;
    rank.set(row, n);
    seen.set(family(row.recipe), n + 1);
  }
  const some = new Set(rows.slice().sort((a, b) => rank.get(a) - rank.get(b)).slice(0, most));
  return rows.filter(row => some.has(row));
}
