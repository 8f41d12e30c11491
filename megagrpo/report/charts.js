// Charts over a run's steps, drawn by uPlot: lines of one or several runs, and stacked areas. One cursor for all of them.
"use strict";

const charts = (() => {
  const { el, number, palette, colour } = report;
  const HEIGHT = 200;
  const PRINTED = [325, 165]; // pixels of a chart on paper
  const cursors = uPlot.sync("steps");
  const all = new Set();
  let printing = false;
  const settings = { smoothing: 0, hidden: new Set() };

  // --- numbers ---------------------------------------------------------------------------------------------------------

  /** The exponential mean of so many values, without bias at the begin; null where there is no value. */
  function smooth(values, window) {
    const keep = 1 - 2 / (window + 1);
    let mean = 0;
    let weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      mean = keep * mean + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return mean / weight;
    });
  }

  /** All steps at which one of the series has a value, rising. series: [{steps, values}]. */
  function unionOf(series) {
    const steps = new Set();
    for (const one of series) one.values.forEach((value, at) => Number.isFinite(value) && steps.add(one.steps[at]));
    return [...steps].sort((a, b) => a - b);
  }

  /** A series' values at `steps`, null where it has none. */
  function aligned(one, steps) {
    const known = new Map();
    one.values.forEach((value, at) => Number.isFinite(value) && known.set(one.steps[at], value));
    return steps.map((step) => known.get(step) ?? null);
  }

  function faint(hex) {
    return `${hex}55`;
  }

  // --- a chart's frame -------------------------------------------------------------------------------------------------

  /** title, sentence, unit as text; `controls` are elements beside the title. */
  function frame(host, told) {
    const readout = el("output", { class: "readout", "aria-live": "off" });
    const plot = el("div", { class: "plot" });
    const heading = el("h4", {}, told.title);
    const head = el("div", { class: "chart-head" }, heading, ...(told.controls ?? []));
    const figure = el(
      "figure",
      { class: told.wide ? "chart wide" : "chart" },
      head,
      told.sentence ? el("p", { class: "soft small" }, told.sentence) : null,
      plot,
      readout,
    );
    host.append(figure);
    return { figure, plot, readout, heading };
  }

  function axes(unit) {
    const stroke = () => colour("--soft");
    const grid = { stroke: () => colour("--grid"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const whole = (_, splits) => splits.map((value) => (Number.isInteger(value) ? number(value) : ""));
    return [
      { stroke, grid, ticks: { show: false }, font, size: 26, gap: 4, space: 60, values: whole },
      {
        stroke,
        grid,
        ticks: { show: false },
        font,
        size: 54,
        gap: 4,
        values: (_, splits) => splits.map((value) => short(value, unit)),
      },
    ];
  }

  function short(value, unit) {
    if (value === null) return "";
    if (unit === "bytes") return bytes(value);
    const size = Math.abs(value);
    if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
    if (size !== 0 && size < 1e-3) return value.toExponential(0);
    return `${+value.toPrecision(4)}`;
  }

  function bytes(value) {
    const power = Math.min(Math.floor(Math.log2(Math.max(value, 1)) / 10), 4);
    return `${+(value / 1024 ** power).toPrecision(3)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  }

  /** Where rules fire: bands behind the lines. */
  function drawBands(chart, marks) {
    const { ctx, bbox } = chart;
    ctx.save();
    ctx.fillStyle = colour("--band");
    for (const { left, right } of marks.filter((mark) => "first" in mark).map((mark) => placeOf(chart, mark))) {
      const width = Math.max(right - left, 2 * uPlot.pxRatio);
      if (right >= bbox.left && left <= bbox.left + bbox.width) ctx.fillRect(left, bbox.top, width, bbox.height);
    }
    ctx.restore();
  }

  /** A wedge above each band, so that one of a single step is seen; a dashed line before a step with which a run was started again. */
  function drawMarks(chart, marks) {
    const { ctx, bbox } = chart;
    const half = 4 * uPlot.pxRatio;
    ctx.save();
    for (const { start, colour: own } of marks.filter((mark) => "start" in mark)) {
      const x = chart.valToPos(start - 0.5, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = own ?? colour("--soft");
      ctx.setLineDash([4 * uPlot.pxRatio, 4 * uPlot.pxRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    for (const mark of marks.filter((mark) => "first" in mark)) {
      const { left, right } = placeOf(chart, mark);
      if (right < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.fillStyle = mark.colour ?? colour("--bad");
      ctx.beginPath();
      ctx.moveTo(left - half, bbox.top - half);
      ctx.lineTo(left + half, bbox.top - half);
      ctx.lineTo(left, bbox.top + half);
      ctx.fill();
    }
    ctx.restore();
  }

  function placeOf(chart, mark) {
    const { bbox } = chart;
    const left = Math.max(chart.valToPos(mark.first - 0.5, "x", true), bbox.left);
    const right = Math.min(chart.valToPos(mark.last + 0.5, "x", true), bbox.left + bbox.width);
    return { left, right };
  }

  function xRange(_, least, most) {
    return least === null ? [0, 1] : least === most ? [least - 1, most + 1] : [least, most];
  }

  function yRange(log) {
    return (_, least, most) => {
      if (least === null || !Number.isFinite(least)) return log ? [0.1, 1] : [0, 1];
      if (least === most && !log)
        return least === 0 ? [0, 1] : [least - Math.abs(least) / 10, most + Math.abs(most) / 10];
      if (log) return uPlot.rangeLog(least, least === most ? most * 10 : most, 10, false);
      return uPlot.rangeNum(least, most, 0.08, true);
    };
  }

  /** A chart in a frame. build() gives {data, series, bands, log, marks, told: (index) => text, summary}. */
  function chart(host, told, build) {
    const parts = frame(host, told);
    let plot = null;
    let built = null;
    let waiting = false;

    function draw() {
      const zoom = plot && zoomed() ? [plot.scales.x.min, plot.scales.x.max] : null;
      const cursor = plot?.cursor.idx;
      built = build();
      plot?.destroy();
      plot = null;
      const empty = built.data.length < 2 || built.data[0].length === 0;
      parts.figure.classList.toggle("empty", empty);
      if (empty) {
        parts.plot.replaceChildren(el("p", { class: "soft" }, built.nothing ?? "No finite value yet."));
        parts.readout.textContent = "";
        return;
      }
      parts.plot.replaceChildren();
      const [width, height] = printing ? PRINTED : [Math.max(parts.plot.clientWidth, 120), told.height ?? HEIGHT];
      const options = {
        width,
        height,
        padding: [10, 16, 0, 0],
        legend: { show: false },
        scales: { x: { time: false, range: xRange }, y: { distr: built.log ? 3 : 1, range: yRange(built.log) } },
        axes: axes(told.unit),
        series: [{ label: "step" }, ...built.series],
        bands: built.bands ?? [],
        cursor: {
          sync: { key: cursors.key, setSeries: false },
          drag: { x: true, y: false, uni: 10 },
          points: { size: 6 },
        },
        hooks: {
          drawClear: [(u) => drawBands(u, built.marks ?? [])],
          draw: [(u) => drawMarks(u, built.marks ?? [])],
          setCursor: [show],
        },
      };
      plot = new uPlot(options, built.data, parts.plot);
      plot.root.setAttribute("role", "img");
      plot.root.tabIndex = 0;
      plot.root.setAttribute("aria-label", `${told.title}: ${built.summary}. Arrow keys move the cursor.`);
      plot.root.addEventListener("keydown", moved);
      plot.root.addEventListener("blur", () => parts.readout.setAttribute("aria-live", "off"));
      if (zoom) plot.setScale("x", { min: zoom[0], max: zoom[1] });
      show({ cursor: { idx: cursor } });
    }

    function zoomed() {
      const steps = plot.data[0];
      return plot.scales.x.min > steps[0] || plot.scales.x.max < steps[steps.length - 1];
    }

    function show({ cursor }) {
      const last = built.data[0].length - 1;
      const at = cursor.idx ?? last;
      if (at < 0 || at > last) return;
      parts.readout.replaceChildren(...built.told(at));
    }

    function moved(event) {
      const last = plot.data[0].length - 1;
      const at = plot.cursor.idx ?? last;
      const stride = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
      const to = { ArrowLeft: at - stride, ArrowRight: at + stride, Home: 0, End: last }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      parts.readout.setAttribute("aria-live", "polite");
      const step = plot.data[0][Math.min(Math.max(to, 0), last)];
      plot.setCursor({ left: plot.valToPos(step, "x"), top: plot.bbox.height / uPlot.pxRatio / 2 }, true, true);
    }

    const observer = new ResizeObserver(() => {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => {
        waiting = false;
        const width = parts.plot.clientWidth;
        if (plot && width && width !== plot.width && !printing) plot.setSize({ width, height: plot.height });
      });
    });
    observer.observe(parts.plot);
    const made = {
      ...parts,
      draw,
      print: () => plot?.setSize({ width: PRINTED[0], height: PRINTED[1] }),
      unprint: () => plot?.setSize({ width: parts.plot.clientWidth, height: told.height ?? HEIGHT }),
      remove() {
        observer.disconnect();
        plot?.destroy();
        parts.figure.remove();
        all.delete(made);
      },
    };
    all.add(made);
    draw();
    return made;
  }

  // --- kinds of charts -------------------------------------------------------------------------------------------------

  /**
   * Lines. told: {title, sentence, unit, log, smooth, height}; source() gives {series: [{label, run, colour, steps,
   * values, dash, low, high}], marks: [{first, last, colour}]}. A log axis leaves out what is not above 0.
   */
  function lines(host, told, source) {
    let log = told.log ?? false;
    const button = el(
      "button",
      { type: "button", class: "tiny control", "aria-pressed": `${log}`, title: "logarithmic axis" },
      "log",
    );
    const made = chart(host, { ...told, controls: [button] }, () => {
      const { series, marks } = source();
      const shown = series.filter((one) => !settings.hidden.has(one.run));
      const known = shown.map((one) => ({
        ...one,
        values: log ? Array.from(one.values, (value) => (value > 0 ? value : NaN)) : Array.from(one.values),
      }));
      const steps = unionOf(known);
      const raw = known.map((one) => aligned(one, steps));
      const smoothed = raw.map((values) => {
        // A metric that only some steps have, such as an evaluation, is smoothed over as many steps, thus fewer values.
        const known = values.filter((value) => value !== null).length;
        const window = Math.round((settings.smoothing * known) / Math.max(steps.at(-1) - steps[0], 1));
        return window > 1 && known > 2 ? smooth(values, window) : null;
      });
      const data = [steps];
      const drawn = [];
      const bands = [];
      known.forEach((one, index) => {
        const own = one.colour ?? palette(index);
        const sparse = raw[index].filter((value) => value !== null).length < steps.length / 2;
        const common = { dash: one.dash, spanGaps: sparse || known.length > 1 };
        if (smoothed[index]) {
          drawn.push({ ...common, stroke: faint(own), width: 1, points: { show: false } });
          data.push(raw[index]);
        }
        drawn.push({ ...common, stroke: own, width: 1.75 });
        data.push(smoothed[index] ?? raw[index]);
        if (one.low && known.length === 1) {
          drawn.push(
            ...[1, 2].map(() => ({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true })),
          );
          data.push(aligned({ ...one, values: one.high }, steps), aligned({ ...one, values: one.low }, steps));
          bands.push({ series: [data.length - 2, data.length - 1], fill: `${own}30` });
        }
      });
      return {
        data,
        series: drawn,
        bands,
        log,
        marks: marks.filter((mark) => !settings.hidden.has(mark.run)),
        nothing:
          log && unionOf(shown).length ? "No value above 0 yet: nothing to show on a logarithmic axis." : undefined,
        summary: known.map((one, index) => summaryOf(one, raw[index], steps)).join("; "),
        told: (at) => [
          el("span", { class: "soft" }, `step ${number(steps[at])}`),
          ...known.map((one, index) =>
            el(
              "span",
              {},
              swatch(one.colour ?? palette(index)),
              series.length > 1 ? `${one.label} ` : "",
              el("b", {}, valueText(raw[index][at], told.unit)),
              smoothed[index] && raw[index][at] !== null
                ? el("span", { class: "soft" }, ` smoothed ${valueText(smoothed[index][at], told.unit)}`)
                : null,
            ),
          ),
        ],
      };
    });
    button.addEventListener("click", () => {
      log = !log;
      button.setAttribute("aria-pressed", `${log}`);
      made.draw();
    });
    return made;
  }

  function summaryOf(one, values, steps) {
    const known = values.filter((value) => value !== null);
    if (!known.length) return `${one.label}: no value`;
    const [least, most] = known.reduce(
      ([a, b], value) => [Math.min(a, value), Math.max(b, value)],
      [Infinity, -Infinity],
    );
    return `${one.label}: steps ${steps[0]} to ${steps[steps.length - 1]}, lowest ${number(least)}, highest ${number(most)}, last ${number(known[known.length - 1])}`;
  }

  function valueText(value, unit) {
    return unit === "bytes" && value !== null ? bytes(value) : number(value);
  }

  function swatch(own) {
    return el("i", { class: "swatch", style: `background:${own}`, "aria-hidden": "true" });
  }

  /** Stacked areas. source() gives {steps, series: [{label, values, colour}]}, the lowest first; NaN counts as 0. */
  function stacked(host, told, source) {
    const off = new Set();
    const legend = el("div", { class: "legend", role: "group", "aria-label": "what is stacked" });
    const made = chart(host, { ...told, wide: true }, () => {
      const { steps, series } = source();
      const shown = series.filter((one) => !off.has(one.label));
      const total = new Array(steps.length).fill(0);
      const plain = shown.map((one) => {
        const values = Array.from(one.values, (value) => (Number.isFinite(value) ? value : 0));
        return settings.smoothing > 1 ? smooth(values, settings.smoothing) : values;
      });
      const sums = plain.map((values) => values.map((value, at) => (total[at] += value)));
      const values = series.map(() => el("b", {}));
      const buttons = series.map((one, index) => {
        const pressed = `${!off.has(one.label)}`;
        const told = [swatch(one.colour), `${one.label} `, values[index]];
        return el(
          "button",
          { type: "button", class: "tiny", "aria-pressed": pressed, onclick: () => toggle(index) },
          ...told,
        );
      });
      legend.replaceChildren(...buttons);
      // uPlot's way of stacking: sums as series, and each band filled down to the series below.
      return {
        data: [Array.from(steps), ...sums],
        series: shown.map((one) => ({
          stroke: one.colour,
          width: 1,
          fill: `${one.colour}cc`,
          points: { show: false },
        })),
        bands: shown.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })),
        summary: shown.map((one, index) => `${one.label} ${number(plain[index].at(-1))} in the last step`).join(", "),
        told: (at) => {
          series.forEach((one, index) => {
            const place = shown.indexOf(one);
            values[index].textContent = place < 0 ? "" : number(plain[place][at]);
          });
          const step = el("span", { class: "soft" }, `step ${number(steps[at])}`);
          return [step, el("b", {}, `${number(total[at])} ${told.unit ?? ""}`)];
        },
      };
    });
    made.readout.before(legend);
    function toggle(index) {
      const { label } = source().series[index];
      if (!off.delete(label)) off.add(label);
      made.draw();
      legend.children[index].focus();
    }
    return made;
  }

  // --- what holds for all ----------------------------------------------------------------------------------------------

  function redraw() {
    for (const made of all) made.draw();
  }

  /** Frees the charts in an element that is about to be emptied. */
  function removeWithin(element) {
    for (const made of [...all]) if (element.contains(made.figure)) made.remove();
  }

  report.themed(redraw);
  addEventListener("beforeprint", () => {
    printing = true;
    all.forEach((made) => made.print());
  });
  addEventListener("afterprint", () => {
    printing = false;
    all.forEach((made) => made.unprint());
  });

  return { lines, stacked, redraw, removeWithin, settings, swatch, valueText };
})();
