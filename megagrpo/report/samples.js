// The section of samples: which are listed and in which order, the list, and what the address keeps of it.
"use strict";

report.part("samples", async (body) => {
  const { el, number } = report;
  const { NONE, SOLVED, MASKED, FAILED, AGENT } = samples;
  const HASH = "#samples";
  const RANGES = { step: "step", score: "score", tokens: "length", age: "age" };
  const STATES = {
    solved: (flags) => flags & SOLVED,
    "not solved": (flags) => !(flags & (SOLVED | MASKED | FAILED)),
    masked: (flags) => flags & MASKED,
    failed: (flags) => flags & FAILED,
    agent: (flags) => flags & AGENT,
  };
  let store = new samples.Store(await report.load("samples"));
  const columns = shownColumns();
  const state = { q: "", sort: "", open: "", with: "", colour: "" };
  const controls = {};
  let order = new Uint32Array(0); // rows that are listed
  let current = NONE; // place in `order`
  let hits = null; // Uint8Array [rows], of the search
  let searching = 0;
  const chosen = { open: NONE, with: NONE }; // rows: a prompt that a step has twice has keys twice

  // --- elements ------------------------------------------------------------------------------------------------------

  const count = el("p", { class: "soft small", role: "status" });
  const head = el("div", { class: "samples-head", role: "row" });
  const sizer = el("div", { class: "samples-sizer" });
  const view = el("div", { class: "samples-view", tabindex: 0, role: "grid", "aria-label": "samples", onscroll: soon, onkeydown: keys });
  const list = el("div", { class: "samples-list" }, view);
  const detail = el("div", { class: "sample", hidden: true, tabindex: -1, "aria-label": "one sample" });
  const split = el("div", { class: "samples-split" }, list, detail);
  view.append(head, sizer);
  body.append(filters(), count, split, notes());

  function shownColumns() {
    const several = (column) => store.names[column].length > 1;
    const known = (column) => store[column].some((value) => !Number.isNaN(value));
    const all = [
      ["run", "run", "90px", store.runs.length > 1, (row) => store.runs[store.run[row]]],
      ["step", "step", "62px", true, (row) => (store.step[row] < 0 ? "–" : String(store.step[row])), "number"],
      ["set", "set", "96px", several("set"), (row) => store.name("set", row)],
      ["source", "source", "100px", several("data_source"), (row) => store.name("data_source", row)],
      ["prompt", "prompt", "minmax(120px, 1fr)", true, (row) => store.prompt_previews[store.prompt[row]]],
      ["response", "end of the response", "minmax(120px, 1.3fr)", true, (row) => store.previews[row]],
      ["score", "score", "74px", true, scoreText, "number"],
      ["advantage", "advantage", "88px", known("advantage"), (row) => number(store.advantage[row]), "number"],
      ["mismatch", "mismatch", "84px", known("mismatch"), (row) => number(store.mismatch[row]), "number"],
      ["tokens", "tokens", "70px", true, (row) => number(store.tokens[row]), "number"],
      ["finish", "finish", "62px", several("finish"), (row) => store.name("finish", row)],
      ["age", "age", "48px", store.age.some((age) => age > 0), (row) => String(store.age[row]), "number"],
    ];
    return all
      .filter(([, , , shown]) => shown)
      .map(([name, title, width, , text, kind = ""]) => ({ name, title, width, text, kind }));
  }

  function scoreText(row) {
    const mark = store.is(row, FAILED) ? "error" : store.is(row, MASKED) ? "masked" : "";
    return mark || `${number(store.score[row])}${store.is(row, SOLVED) ? " ✓" : ""}`;
  }

  function filters() {
    const choice = (name, label, values, shown) => {
      controls[name] = el(
        "select",
        { "aria-label": label, onchange: changed },
        el("option", { value: "" }, `any ${label}`),
        ...values.map((value) => el("option", { value }, value || "(none)")),
      );
      return shown ? controls[name] : null;
    };
    const search = el("input", { type: "search", placeholder: "find in prompts and responses; /pattern/", "aria-label": "find", oninput: typed });
    controls.q = search;
    const ranges = Object.entries(RANGES).map(([name, label]) => {
      const [low, high] = extent(store[name]);
      const hint = low === high ? String(low) : `${low}..${high}`;
      controls[name] = el("input", { type: "text", class: "range", placeholder: hint, title: "a number, FROM..TO, FROM.. or ..TO", oninput: changed });
      return el("label", { class: "small" }, label, controls[name]);
    });
    const { names } = store;
    const more = el(
      "div",
      { class: "controls" },
      choice("run", "run", store.runs, store.runs.length > 1),
      choice("set", "set", names.set, names.set.length > 1),
      choice("source", "source", names.data_source, names.data_source.length > 1),
      choice("finish", "finish", names.finish, names.finish.length > 1),
      choice("state", "state", Object.keys(STATES), true),
      ...ranges,
      el("button", { type: "button", onclick: clear }, "clear"),
    );
    const folded = el("details", { class: "samples-filters", open: innerWidth > 760 }, el("summary", {}, "filters"), more);
    return el("div", { role: "search", class: "samples-search" }, el("div", { class: "controls" }, search), folded);
  }

  function extent(column) {
    let low = Infinity;
    let high = -Infinity;
    for (const value of column) {
      if (column === store.step && value < 0) continue; // not of a step
      if (value < low) low = value;
      if (value > high) high = value;
    }
    return low <= high ? [Number(low.toPrecision(3)), Number(high.toPrecision(3))] : [0, 0];
  }

  function notes() {
    if (!store.notes.length) return null;
    const items = store.notes.map((text) => el("li", {}, ...samples.shown(text)));
    return el("details", { class: "small soft samples-notes" }, el("summary", {}, "what is not in this page"), el("ul", {}, ...items));
  }

  // --- which, and in which order ---------------------------------------------------------------------------------------

  /** Lowest and highest value that a range takes; null if it is none. */
  function range(text) {
    const trimmed = text.trim();
    if (!trimmed) return [-Infinity, Infinity];
    const parts = trimmed.split("..").map((part) => part.trim());
    const bounds = parts.length === 1 ? [parts[0], parts[0]] : parts.length === 2 ? parts : ["x", "x"];
    const [low, high] = [bounds[0] === "" ? -Infinity : Number(bounds[0]), bounds[1] === "" ? Infinity : Number(bounds[1])];
    return Number.isNaN(low) || Number.isNaN(high) ? null : [low, high];
  }

  function listed() {
    const tests = [];
    for (const [name, column] of [["set", "set"], ["source", "data_source"], ["finish", "finish"]]) {
      const code = store.names[column].indexOf(state[name] ?? "");
      if (state[name]) tests.push((row) => store[column][row] === code);
    }
    if (state.run) {
      const code = store.runs.indexOf(state.run);
      tests.push((row) => store.run[row] === code);
    }
    if (STATES[state.state]) tests.push((row) => STATES[state.state](store.flags[row]));
    for (const name of Object.keys(RANGES)) {
      const bounds = range(state[name] ?? "");
      controls[name].setAttribute("aria-invalid", bounds === null);
      if (bounds && state[name]?.trim()) {
        // a float32 that was 0.1 is a little more
        const slack = (value) => (Number.isFinite(value) ? Math.abs(value) * 1e-6 : 0);
        const [low, high] = [bounds[0] - slack(bounds[0]), bounds[1] + slack(bounds[1])];
        tests.push((row) => store[name][row] >= low && store[name][row] <= high);
      }
    }
    if (hits) tests.push((row) => hits[row]);
    const rows = new Uint32Array(store.rows);
    let size = 0;
    for (let row = 0; row < store.rows; row++) if (tests.every((test) => test(row))) rows[size++] = row;
    return sorted(rows.subarray(0, size));
  }

  function sorted(rows) {
    const down = state.sort.startsWith("-");
    const name = state.sort.replace("-", "") || "step";
    const values = sortable(name);
    const sign = down || !state.sort ? -1 : 1;
    return rows.sort((one, other) => {
      const [a, b] = [values[one], values[other]];
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b) || one - other;
      return sign * (a - b) || one - other;
    });
  }

  /** Numbers by which a column is sorted; for texts, their places in the alphabet. */
  function sortable(name) {
    const texts = { run: ["run", store.runs], set: ["set", store.names.set], source: ["data_source", store.names.data_source], finish: ["finish", store.names.finish] };
    if (name === "prompt") return rank(store.prompt, store.prompt_ids);
    if (name === "response") {
      return rank(Uint32Array.from(store.previews.keys()), store.previews);
    }
    return texts[name] ? rank(store[texts[name][0]], texts[name][1]) : store[name] ?? store.step;
  }

  function rank(codes, values) {
    const collator = new Intl.Collator("en", { numeric: true });
    const places = new Float64Array(values.length);
    [...values.keys()].sort((a, b) => collator.compare(values[a], values[b])).forEach((code, place) => (places[code] = place));
    return Float64Array.from(codes, (code) => places[code]);
  }

  /** Lists anew. The sample that is open stays the current one if it is listed. */
  function refresh() {
    const row = current === NONE ? NONE : order[current];
    order = listed();
    current = row === NONE ? NONE : order.indexOf(row);
    sizer.style.height = `${order.length * rowHeight()}px`;
    view.setAttribute("aria-rowcount", order.length);
    draw();
    countShown();
  }

  function countShown(share = 1) {
    const scores = [];
    for (const row of order) if (!Number.isNaN(store.score[row])) scores.push(store.score[row]);
    const mean = scores.length ? `, mean score ${number(scores.reduce((sum, score) => sum + score, 0) / scores.length)}` : "";
    const still = share < 1 ? `; searching, ${Math.round(100 * share)} %` : "";
    count.textContent = `${number(order.length)} of ${number(store.rows)} samples${mean}${still}`;
  }

  // --- search ----------------------------------------------------------------------------------------------------------

  let typing = 0;

  function typed() {
    clearTimeout(typing);
    typing = setTimeout(changed, 250);
  }

  function pattern(text) {
    const given = /^\/(.+)\/$/su.exec(text);
    try {
      return new RegExp(given ? given[1] : text.replace(/[.*+?^${}()|[\]\\/-]/gu, "\\$&"), "giu");
    } catch {
      return null;
    }
  }

  async function find() {
    const turn = ++searching;
    const wanted = state.q ? pattern(state.q) : null;
    controls.q.setAttribute("aria-invalid", Boolean(state.q) && !wanted);
    hits = wanted ? new Uint8Array(store.rows) : null;
    if (!wanted) return refresh();
    const marks = hits;
    let drawn = 0;
    await store.search(wanted, marks, (share) => {
      if (turn !== searching) return false;
      if (performance.now() - drawn > 300 || share === 1) {
        drawn = performance.now();
        refresh();
        countShown(share);
      }
      return true;
    });
    if (turn === searching) refresh();
    return undefined;
  }

  // --- the list --------------------------------------------------------------------------------------------------------

  function narrow() {
    return split.clientWidth < 760 || split.classList.contains("opened");
  }

  function rowHeight() {
    return narrow() ? 58 : 34;
  }

  let drawing = 0;

  function soon() {
    cancelAnimationFrame(drawing);
    drawing = requestAnimationFrame(draw);
  }

  function draw() {
    const height = rowHeight();
    const wide = !narrow();
    list.classList.toggle("narrow", !wide);
    list.style.setProperty("--columns", columns.map((column) => column.width).join(" "));
    const first = Math.max(0, Math.floor(view.scrollTop / height) - 4);
    const last = Math.min(order.length, Math.ceil((view.scrollTop + view.clientHeight) / height) + 4);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(rowElement(place, height, wide));
    sizer.replaceChildren(...rows);
    view.setAttribute("aria-activedescendant", current === NONE ? "" : `sample-${current}`);
  }

  function rowElement(place, height, wide) {
    const row = order[place];
    const attributes = {
      role: "row",
      id: `sample-${place}`,
      class: "samples-row",
      "aria-rowindex": place + 1,
      "aria-selected": String(place === current),
      style: `top:${place * height}px;height:${height}px`,
      onclick: () => open(place),
    };
    const cell = (column) =>
      el("span", { role: "gridcell", class: column.kind, "data-column": column.name }, ...samples.shown(column.text(row)));
    if (wide) return el("div", attributes, ...columns.map(cell));
    const named = Object.fromEntries(columns.map((column) => [column.name, column]));
    const parts = ["step", "set", "score", "tokens", "run"].filter((name) => named[name]);
    const texts = parts.map((name) => (name === "step" ? `step ${named.step.text(row)}` : name === "tokens" ? `${named.tokens.text(row)} tokens` : named[name].text(row)));
    return el(
      "div",
      attributes,
      el("span", { role: "gridcell", class: "small soft" }, ...samples.shown(texts.join(" · "))),
      cell(named.response),
    );
  }

  function heading() {
    head.replaceChildren(
      ...columns.map(({ name, title, kind }) => {
        const sort = state.sort || "-step";
        const direction = sort === name ? "ascending" : sort === `-${name}` ? "descending" : "none";
        const mark = { ascending: " ▴", descending: " ▾", none: "" }[direction];
        const press = () => set({ sort: direction === "descending" ? name : `-${name}` });
        const button = el("button", { type: "button", class: "plain", onclick: press, title: `sort by ${title}` }, title + mark);
        return el("span", { role: "columnheader", class: kind, "aria-sort": direction }, button);
      }),
    );
  }

  function keys(event) {
    const page = Math.max(1, Math.floor(view.clientHeight / rowHeight()) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && current !== NONE) open(current, true);
    else if (event.key in moves && order.length) {
      const place = Math.min(order.length - 1, Math.max(0, current + moves[event.key]));
      if (split.classList.contains("opened")) open(place);
      else {
        current = place;
        reveal();
        draw();
      }
    } else return;
    event.preventDefault();
  }

  /** Scrolls to the current row. */
  function reveal() {
    const height = rowHeight();
    const top = current * height;
    const seen = view.clientHeight - head.offsetHeight;
    if (top < view.scrollTop) view.scrollTop = top;
    else if (top + height > view.scrollTop + seen) view.scrollTop = top + height - seen;
  }

  // --- one of them -----------------------------------------------------------------------------------------------------

  function open(place, focus = false) {
    current = place;
    choose("open", order[place]);
    if (focus) detail.focus({ preventScroll: true });
  }

  /** Opens a row, or puts it beside the one that is open. */
  function choose(name, row) {
    chosen[name] = row;
    const key = row === NONE ? "" : store.key(row);
    const same = key === state[name];
    set(name === "open" ? { open: key, with: "" } : { with: key });
    if (same) showOpen();
  }

  function rowOf(name) {
    const key = state[name];
    if (!key) return NONE;
    return chosen[name] < store.rows && chosen[name] !== NONE && store.key(chosen[name]) === key ? chosen[name] : store.rowOf(key);
  }

  function close() {
    set({ open: "", with: "" });
    view.focus({ preventScroll: true });
  }

  async function showOpen() {
    const row = rowOf("open");
    const was = split.classList.contains("opened");
    split.classList.toggle("opened", Boolean(state.open));
    detail.hidden = !state.open;
    if (was !== Boolean(state.open)) refresh();
    if (!state.open) return detail.replaceChildren();
    if (row === NONE) {
      const message = "The sample of this link is not in this page.";
      return detail.replaceChildren(el("p", {}, message), el("button", { type: "button", onclick: close }, "back to the list"));
    }
    current = order.indexOf(row);
    if (current !== NONE) reveal();
    draw();
    const key = state.open;
    const shown = await viewed(row).catch((error) => [el("p", { class: "bad", role: "alert" }, error.message)]);
    if (key !== state.open) return undefined; // another was opened meanwhile
    const scrolled = detail.dataset.key === key ? detail.scrollTop : 0;
    detail.dataset.key = key;
    detail.replaceChildren(...shown);
    detail.scrollTop = scrolled;
    if (!was && split.clientWidth < 760) body.scrollIntoView();
    return undefined;
  }

  function viewed(row) {
    return sampleView(store, row, {
      place: current,
      listed: order.length,
      compared: rowOf("with"),
      colour: state.colour,
      close,
      step: (by) => current !== NONE && order[current + by] !== undefined && open(current + by, true),
      compare: (other) => choose("with", other),
      coloured: (colour) => set({ colour }, false),
      go: (other) => choose("open", other),
    });
  }

  addEventListener("keydown", (event) => {
    if (!state.open || event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea")) return;
    if (event.key === "Escape") close();
    else if (event.key === "j" || event.key === "k") {
      const by = event.key === "j" ? 1 : -1;
      if (current !== NONE && order[current + by] !== undefined) open(current + by, true);
    }
  });

  // --- state and address -----------------------------------------------------------------------------------------------

  function changed() {
    const values = Object.fromEntries(Object.entries(controls).map(([name, control]) => [name, control.value]));
    set(values);
  }

  function clear() {
    for (const control of Object.values(controls)) control.value = "";
    changed();
  }

  /** Takes these values, keeps them in the address and shows what they change. */
  function set(values, show = true) {
    const before = { ...state };
    Object.assign(state, values);
    const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value));
    const text = query.toString();
    history.replaceState(null, "", text ? `${HASH}?${text}` : HASH);
    if (show) apply(before);
  }

  function apply(before) {
    const same = (...names) => names.every((name) => (before[name] ?? "") === (state[name] ?? ""));
    if (!same("q")) find();
    else if (!same("sort", ...Object.keys(controls))) refresh();
    if (!same("sort")) heading();
    if (!same("open", "with")) return showOpen();
    return undefined;
  }

  function fromAddress() {
    if (location.hash !== HASH && !location.hash.startsWith(`${HASH}?`)) return;
    const before = { ...state };
    const query = new URLSearchParams(location.hash.slice(HASH.length + 1));
    for (const name of new Set([...Object.keys(state), ...Object.keys(controls)])) state[name] = query.get(name) ?? "";
    for (const [name, control] of Object.entries(controls)) control.value = state[name];
    apply(before);
  }

  heading();
  refresh();
  fromAddress();
  if (location.hash.startsWith(`${HASH}?`)) body.parentElement.scrollIntoView();
  addEventListener("hashchange", fromAddress);
  new ResizeObserver(() => {
    sizer.style.height = `${order.length * rowHeight()}px`;
    soon();
  }).observe(split);
  report.changed("samples", (fresh) => {
    store = new samples.Store(fresh);
    find();
  });
  performance.mark("samples-ready");
});
