// The part "recipe": every setting, folded by section, to search; of several runs side by side.
"use strict";

report.part("recipe", async (body) => {
  const { el } = report;
  const { runs, paths, values } = await report.load("recipe");
  const several = runs.length > 1;
  const differs = (at) => several && new Set(values.map((one) => one[at])).size > 1;
  const search = el("input", {
    type: "search",
    placeholder: "such as optimizer, lr, tokens",
    "aria-label": "search the recipe",
  });
  const count = el("span", { class: "soft small", role: "status" });
  const only = el("input", { type: "checkbox" });
  const sections = el("div", {});
  const differing = paths.filter((_, at) => differs(at)).length;
  only.checked = differing > 0;
  const choice = several ? el("label", {}, only, `only what differs (${differing})`) : null;
  body.append(el("div", { class: "controls" }, search, ...(choice ? [choice] : []), count), sections);

  function row(at) {
    const cells = values.map((one) => el("td", {}, el("code", {}, one[at] ?? "–")));
    return el("tr", { class: differs(at) ? "differs" : "" }, el("td", {}, el("code", {}, paths[at])), ...cells);
  }

  function list() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...paths.keys()].filter((at) => {
      const text = `${paths[at]} ${values.map((one) => one[at]).join(" ")}`.toLowerCase();
      return words.every((word) => text.includes(word)) && (!only.checked || differs(at));
    });
    const groups = Map.groupBy(found, (at) => (paths[at].includes(".") ? paths[at].split(".")[0] : "the run"));
    count.textContent =
      found.length === paths.length ? `${paths.length} settings` : `${found.length} of ${paths.length} settings`;
    sections.replaceChildren(
      ...[...groups].map(([name, members]) => {
        const head = several
          ? [el("thead", {}, el("tr", {}, el("th", {}), ...runs.map((run) => el("th", {}, run))))]
          : [];
        const table = el("table", {}, ...head, el("tbody", {}, ...members.map(row)));
        const summary = el("summary", {}, el("b", {}, name), el("span", { class: "soft small" }, ` ${members.length}`));
        return el(
          "details",
          { class: "group", open: words.length > 0 || only.checked },
          summary,
          el("div", { class: "scroll" }, table),
        );
      }),
    );
    if (!paths.length) sections.append(el("p", { class: "soft" }, "This directory has no recipe.yaml."));
  }

  search.addEventListener("input", list);
  only.addEventListener("change", list);
  list();
  addEventListener("beforeprint", () =>
    sections.querySelectorAll("details").forEach((details) => (details.open = true)),
  );
});
