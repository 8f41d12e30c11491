// The part "time": seconds by phase, stacked, and curves of what waits and what moves.
"use strict";

(async () => {
  const { el, palette } = report;
  let [timing, { runs }] = await Promise.all(["timing", "runs"].map(report.load));
  const { source } = await curves;

  /** A run's seconds by phase, to stack. */
  function phases(run) {
    const { steps, seconds } = timing.runs[run];
    const series = Object.entries(seconds).map(([label, values], index) => ({
      label,
      values,
      colour: label === "other" ? "#9aa3ab" : palette(index),
    }));
    return { steps, series };
  }

  report.part("time", (body) => {
    const grid = el("div", { class: "grid wide" });
    body.append(grid);
    runs.forEach((run, index) => {
      if (!timing.runs[index].steps.length) return;
      const title = runs.length > 1 ? `Seconds of a step by phase: ${run.name}` : "Seconds of a step by phase";
      const sentence = "Each phase takes its part; what no phase tells is “other”. Click a phase to leave it out.";
      charts.stacked(grid, { title, sentence, unit: "s", height: 260 }, () => phases(index));
    });
    for (const { title, metric, sentence, unit } of timing.curves) {
      if (source(metric)().series.length) charts.lines(grid, { title, sentence, unit }, source(metric));
    }
    if (!grid.children.length) body.append(el("p", { class: "soft" }, "No step has finished yet."));
    report.changed("timing", (columns) => {
      timing = columns;
      charts.redraw();
    });
  });
})();
