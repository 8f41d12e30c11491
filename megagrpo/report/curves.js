// The parts "health" and "metrics": curves of all runs, and where rules fire.
"use strict";

const curves = (async () => {
  const { el, number, palette } = report;
  const AUTO_SMOOTHING = 50; // the smoothing at first is a fiftieth of the run
  const NAMES_MAX = 40; // metrics of a group that are shown at once
  let [metrics, { runs }, fired, meanings] = await Promise.all(
    ["metrics", "runs", "firings", "meanings"].map(report.load),
  );
  const { curves: first } = await report.load("health");

  // --- what charts read ------------------------------------------------------------------------------------------------

  const several = () => runs.length > 1;

  function namesOf(pattern) {
    const whole = new RegExp(`^(?:${pattern})$`);
    const names = new Set();
    for (const one of Object.values(metrics))
      Object.keys(one.values).forEach((name) => whole.test(name) && names.add(name));
    return [...names].sort();
  }

  function escaped(name) {
    return name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  }

  /** A chart's series: of every run, every metric that the pattern matches. Runs have colours, or else metrics. */
  function source(pattern) {
    return () => {
      const names = namesOf(pattern);
      const series = [];
      names.forEach((name, at) => {
        for (const [run, one] of Object.entries(metrics)) {
          if (!one.values[name]) continue;
          series.push({
            label: several() ? (names.length > 1 ? `${runs[run].name} ${name}` : runs[run].name) : name,
            run: Number(run),
            colour: palette(several() ? Number(run) : at),
            dash: several() && at ? [4 + 2 * at, 4] : undefined,
            steps: one.steps,
            values: one.values[name],
            low: one.values[`${name}/low`],
            high: one.values[`${name}/high`],
          });
        }
      });
      const marks = fired.firings
        .filter((firing) => fired.rules[firing.rule].reads.some((name) => names.includes(name)))
        .map((firing) => ({ ...firing, colour: several() ? palette(firing.run) : undefined }));
      const starts = runs.flatMap((run, index) =>
        run.starts.map((step) => ({ run: index, start: step, colour: several() ? palette(index) : undefined })),
      );
      return { series, marks: [...marks, ...starts] };
    };
  }

  // --- health ----------------------------------------------------------------------------------------------------------

  function summary() {
    return runs.map((run, index) => {
      const progress = run.total ? `${number(run.step)} of ${number(run.total)}` : number(run.step);
      const chips = [
        ["step", progress],
        ["from first step to last", duration(run)],
      ];
      for (const [title, [first, last]] of Object.entries(run.figures))
        chips.push([`${title}, first → last`, `${number(first)} → ${number(last)}`]);
      const name = several() ? el("h3", {}, charts.swatch(palette(index)), run.name) : null;
      const figures = chips.map(([title, value]) =>
        el("div", { class: "chip" }, el("b", {}, value), el("span", {}, title)),
      );
      return el(
        "div",
        {},
        name,
        el(
          "p",
          { class: "soft small" },
          `${run.directory}${run.last ? `, last step ${new Date(run.last * 1000).toLocaleString()}` : ""}`,
        ),
        el("div", { class: "chips" }, ...figures),
      );
    });
  }

  function duration(run) {
    if (run.began === null || run.last === null) return "–";
    const minutes = (run.last - run.began) / 60;
    return minutes < 90 ? `${number(Math.round(minutes * 10) / 10)} min` : `${number(Math.round(minutes / 6) / 10)} h`;
  }

  /** `code` between backticks. */
  function marked(text) {
    return text.split("`").map((piece, index) => (index % 2 ? el("code", {}, piece) : piece));
  }

  function firingList() {
    if (!fired.firings.length) {
      return [
        el(
          "p",
          {},
          el("b", { class: "good" }, "✓ No rule fires."),
          el("span", { class: "soft small" }, ` Looked for: ${fired.known.join(", ")}.`),
        ),
      ];
    }
    const rows = Object.entries(fired.rules).map(([name, rule]) => {
      const steps = runs.map((run, index) => {
        const spans = fired.firings.filter((one) => one.rule === name && one.run === index);
        if (!spans.length) return null;
        const now = spans.at(-1).last === run.step;
        const text = spans
          .slice(-6)
          .map(({ first, last }) => (first === last ? `${first}` : `${first}–${last}`))
          .join(", ");
        const earlier = spans.length > 6 ? `${spans.length - 6} times before; ` : "";
        return el(
          "div",
          {},
          several() ? charts.swatch(palette(index)) : null,
          `step ${earlier}${text}`,
          now ? el("b", {}, ", now") : null,
        );
      });
      const links = rule.reads
        .slice(0, 6)
        .flatMap((metric) => [" ", el("a", { href: "#metrics", onclick: () => show(metric) }, metric)]);
      return el(
        "details",
        { class: "firing" },
        el(
          "summary",
          {},
          el("b", { class: "bad" }, rule.title),
          " ",
          el("span", { class: "steps" }, ...steps.filter(Boolean)),
        ),
        el("p", {}, ...marked(rule.meaning)),
        el("p", {}, el("b", {}, "What to do. "), ...marked(rule.remedy)),
        el("p", { class: "soft small" }, "Look at:", ...links),
      );
    });
    return [el("p", { class: "soft small" }, "Where a rule fires, the curves that it reads have a band."), ...rows];
  }

  report.part("health", (body) => {
    const top = el("div", {}, ...summary());
    const list = el("div", { class: "firings" }, ...firingList());
    const longest = Math.max(...Object.values(metrics).map((one) => one.steps.length), 0);
    charts.settings.smoothing = Math.min(Math.round(longest / AUTO_SMOOTHING), 50);
    const grid = el("div", { class: "grid" });
    body.append(top, list, controls(), grid);
    for (const curve of first) {
      if (namesOf(curve.metric).length === 0)
        body.append(el("p", { class: "soft small" }, `${curve.title}: ${curve.lacking}`));
      else charts.lines(grid, { title: curve.title, sentence: curve.sentence, log: curve.log }, source(curve.metric));
    }
    const others = new Set();
    /** What else the rules read that fire. */
    function addRead() {
      for (const name of Object.values(fired.rules).flatMap((rule) => rule.reads)) {
        if (others.has(name) || first.some((curve) => namesOf(curve.metric).includes(name))) continue;
        others.add(name);
        const [unit, meaning] = meanings[name] ?? ["", ""];
        charts.lines(
          grid,
          { title: name, unit, sentence: `${meaning} Here because a rule fires that reads it.` },
          source(escaped(name)),
        );
      }
    }
    addRead();
    queueMicrotask(() => performance.mark("health drawn")); // behind uPlot's own microtasks
    report.changed("runs", (columns) => {
      runs = columns.runs;
      top.replaceChildren(...summary());
    });
    report.changed("firings", (columns) => {
      const open = [...list.querySelectorAll("details[open] b:first-child")].map((title) => title.textContent);
      fired = columns;
      list.replaceChildren(...firingList());
      for (const one of list.querySelectorAll("details")) one.open = open.includes(one.querySelector("b").textContent);
      addRead();
      charts.redraw();
    });
  });

  function controls() {
    const shown = el("output", {}, smoothingText());
    const slider = el("input", {
      type: "range",
      min: 0,
      max: 100,
      value: charts.settings.smoothing,
      "aria-label": "smoothing, in steps",
    });
    slider.addEventListener("input", () => {
      charts.settings.smoothing = Number(slider.value);
      shown.textContent = smoothingText();
      charts.redraw();
    });
    const switches = runs.map((run, index) => {
      const button = el("button", { type: "button", "aria-pressed": "true" }, charts.swatch(palette(index)), run.name);
      button.addEventListener("click", () => {
        const hidden = charts.settings.hidden;
        if (!hidden.delete(index)) hidden.add(index);
        button.setAttribute("aria-pressed", `${!hidden.has(index)}`);
        charts.redraw();
      });
      return button;
    });
    const hint = el(
      "span",
      { class: "soft small" },
      "Drag across a chart to zoom all of them, double-click to see everything.",
    );
    return el(
      "div",
      { class: "controls" },
      el("label", {}, "smoothing", slider, shown),
      ...(several() ? switches : []),
      hint,
    );
  }

  function smoothingText() {
    return charts.settings.smoothing > 1 ? `${charts.settings.smoothing} steps` : "none";
  }

  // --- all metrics -----------------------------------------------------------------------------------------------------

  let show = () => {};

  report.part("metrics", async (body) => {
    const search = el("input", {
      type: "search",
      placeholder: "such as eval, length, seconds/step",
      "aria-label": "search metrics by name or meaning",
    });
    const count = el("span", { class: "soft small", role: "status" });
    const groups = el("div", {});
    body.append(el("div", { class: "controls" }, search, count), groups);

    function values(name) {
      return Object.values(metrics).map((one) =>
        one.values[name] ? Array.from(one.values[name]).findLast(Number.isFinite) : undefined,
      );
    }

    function row(name) {
      const [unit, meaning] = meanings[name] ?? ["", ""];
      const last = el(
        "span",
        { class: "last" },
        values(name)
          .map((value) => number(value))
          .join(" · "),
      );
      const details = el(
        "details",
        { class: "metric", "data-name": name },
        el("summary", {}, el("code", {}, name), " ", last, el("span", { class: "soft small unit" }, unit)),
        el("p", { class: "soft small" }, meaning),
      );
      details.addEventListener("toggle", () => details.open && draw(details, name, unit));
      return details;
    }

    function draw(details, name, unit) {
      if (details.querySelector("figure")) return;
      charts.lines(details, { title: name, unit, log: false }, source(escaped(name)));
    }

    /** A metric that is the only one of its group. */
    function alone(name, open) {
      const one = row(name);
      one.classList.add("group");
      one.open = open.has(name);
      return one;
    }

    function list() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const open = new Set([...groups.querySelectorAll(".metric[open]")].map((details) => details.dataset.name));
      const unfolded = new Set(
        [...groups.querySelectorAll(".group[open]:not(.metric)")].map((details) => details.dataset.prefix),
      );
      const names = Object.keys(meanings).filter((name) =>
        words.every((word) => `${name} ${meanings[name][1]}`.toLowerCase().includes(word)),
      );
      const prefixes = Map.groupBy(names, (name) => name.split("/")[0]);
      count.textContent = words.length
        ? `${names.length} of ${Object.keys(meanings).length} metrics`
        : `${names.length} metrics`;
      charts.removeWithin(groups);
      groups.replaceChildren(
        ...[...prefixes].map(([prefix, members]) => {
          if (members.length === 1) return alone(members[0], open);
          const group = el(
            "details",
            { class: "group", "data-prefix": prefix },
            el("summary", {}, el("b", {}, prefix), el("span", { class: "soft small" }, ` ${members.length}`)),
          );
          const fill = () => {
            if (group.querySelector(".metric")) return;
            const rows = members.map(row);
            group.append(...rows.slice(0, NAMES_MAX));
            if (rows.length > NAMES_MAX) {
              const more = el(
                "button",
                { type: "button", class: "more", onclick: () => more.replaceWith(...rows.slice(NAMES_MAX)) },
                `${rows.length - NAMES_MAX} more`,
              );
              group.append(more);
            }
            for (const one of rows) one.open = open.has(one.dataset.name);
          };
          group.addEventListener("toggle", () => group.open && fill());
          group.fill = fill;
          if (words.length || unfolded.has(prefix)) {
            fill();
            group.open = true;
          }
          return group;
        }),
      );
    }

    search.addEventListener("input", list);
    list();
    show = (name) => {
      search.value = name;
      list();
      const metric = groups.querySelector(`.metric[data-name="${CSS.escape(name)}"]`);
      if (metric) metric.open = true;
    };
    addEventListener("beforeprint", () => {
      for (const group of groups.querySelectorAll(".group")) {
        group.fill?.();
        group.querySelector(".more")?.click();
        group.open = true;
      }
      for (const details of groups.querySelectorAll(".metric")) {
        details.open = true;
        draw(details, details.dataset.name, meanings[details.dataset.name]?.[0]);
      }
    });
    report.changed("meanings", (columns) => {
      meanings = columns;
      list();
    });
    report.changed("metrics", (columns) => {
      metrics = columns;
      charts.redraw();
      for (const details of groups.querySelectorAll(".metric")) {
        details.querySelector(".last").textContent = values(details.dataset.name)
          .map((value) => number(value))
          .join(" · ");
      }
    });
  });

  return { source };
})();
