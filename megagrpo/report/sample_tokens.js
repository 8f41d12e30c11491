// A response's tokens in the colours of a figure, with a legend; what is known of a token is shown where one points.
"use strict";

const tokenView = (() => {
  const { el, number } = report;
  const AT_ONCE = 3_000; // tokens
  const LEVELS = 8; // of a colour, on each side of zero
  const UNITS = { difference: "nats", logprob: "nats", entropy: "nats", advantage: "", teacher: "nats", divergence: "nats" };
  const FIGURES = {
    difference: "train − rollout logprob",
    advantage: "advantage",
    entropy: "entropy",
    logprob: "rollout logprob",
    teacher: "teacher − rollout logprob",
    divergence: "divergence from the teacher",
    version: "version of the weights",
  };
  const SIGNED = ["difference", "advantage", "teacher"];
  const MEANING = {
    difference: ["the trainer finds it less likely", "more likely than the engine did"],
    advantage: ["made less likely", "made more likely"],
    entropy: ["sure", "unsure"],
    logprob: ["likely", "unlikely"],
    teacher: ["the teacher finds it less likely", "more likely than the policy did"],
    divergence: ["as the teacher", "far from it"],
    version: ["older", "newer"],
  };

  /** Where the colours of a figure end: the size below which 99 % of this sample's values lie, as 1, 2 or 5 times ten to a power. */
  function bound(values) {
    const sizes = Float32Array.from(values, Math.abs).filter(Number.isFinite).sort();
    const high = sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes.at(-1) || 1;
    const power = 10 ** Math.floor(Math.log10(high));
    return [1, 2, 5, 10].map((times) => times * power).find((most) => most >= high * 0.999) ?? high;
  }

  /** Gives each token its colour: a class and a level from 0 to LEVELS. */
  function scale(figures, name) {
    if (name === "version") {
      const versions = [...new Set(figures.version)].sort((a, b) => a - b);
      const level = new Map(versions.map((version, place) => [version, versions.length === 1 ? 0 : 1 + Math.round((place * (LEVELS - 1)) / (versions.length - 1))]));
      const of = (index) => ["size", level.get(figures.version[index])];
      return { of, ends: [versions[0], versions.at(-1)], signed: false };
    }
    const values = figures[name];
    const most = bound(values);
    const signed = SIGNED.includes(name);
    const of = (index) => {
      const value = values[index];
      if (Number.isNaN(value)) return ["unknown", 0];
      const level = Math.min(LEVELS, Math.round((Math.abs(value) / most) * LEVELS));
      return [!signed ? "size" : value < 0 ? "below" : "above", level];
    };
    return { of, ends: signed ? [-most, most] : name === "logprob" ? [0, -most] : [0, most], signed };
  }

  function legend(name, { ends, signed }) {
    const swatches = [];
    for (let level = signed ? -LEVELS : 0; level <= LEVELS; level++) {
      const kind = !signed ? "size" : level < 0 ? "below" : "above";
      swatches.push(el("span", { class: `token ${kind}`, "data-level": Math.abs(level) }));
    }
    const [low, high] = MEANING[name];
    const unit = UNITS[name] ? ` ${UNITS[name]}` : "";
    const value = (end) => (name === "version" ? String(end) : number(end));
    return el(
      "div",
      { class: "token-legend small" },
      el("span", {}, `${value(ends[0])}${unit}: ${low}`),
      el("span", { class: "swatches", "aria-hidden": "true" }, ...swatches),
      el("span", {}, `${value(ends[1])}${unit}${name === "version" ? "" : " and beyond"}: ${high}`),
    );
  }

  /** A token's text with its white space to be seen; lines may break after spaces. */
  function visible(text) {
    if (text === "") return [el("span", { class: "white" }, "∅")];
    const nodes = [];
    for (const part of text.split(/([ \t\n\r]+)/u)) {
      if (!part) continue;
      if (!/^[ \t\n\r]/u.test(part)) nodes.push(...samples.shown(part));
      else nodes.push(el("span", { class: "white" }, part.replaceAll(" ", "·\u200b").replaceAll("\t", "→\t").replaceAll("\r", "␍").replaceAll("\n", "↵\n")));
    }
    return nodes;
  }

  function isSpecial(text) {
    return /^<[^<>\s]{1,60}>$/u.test(text) || /^\[[A-Z_/]{2,40}\]$/u.test(text);
  }

  /** Nodes: what to colour by, the legend, the tokens, and the numbers of the token that is pointed at. `plain`: the text alone. */
  return function tokenView(figures, plain, options) {
    const known = Object.keys(FIGURES).filter((name) => name === "version" || figures[name].some((value) => !Number.isNaN(value)));
    const box = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens; arrow keys go from one to the next" });
    const told = el("div", { class: "token-told small", role: "status" });
    const under = el("div", {});
    const picked = () => {
      options.coloured(pick.value);
      show(pick.value);
    };
    const pick = el(
      "select",
      { "aria-label": "colours", onchange: picked },
      el("option", { value: "" }, "text"),
      ...known.map((name) => el("option", { value: name }, `tokens by ${FIGURES[name]}`)),
    );
    let spans = [];
    let chosen = -1;

    function show(name) {
      chosen = -1;
      told.replaceChildren();
      if (!name) return under.replaceChildren(plain);
      const colours = scale(figures, name);
      spans = [];
      box.replaceChildren();
      extend(colours);
      under.replaceChildren(legend(name, colours), box, told);
      return undefined;
    }

    function extend(colours) {
      const end = Math.min(figures.size, spans.length + AT_ONCE);
      const made = [];
      for (let index = spans.length; index < end; index++) {
        const [kind, level] = colours.of(index);
        const text = figures.texts[index];
        const special = isSpecial(text) ? " special" : "";
        made.push(el("span", { class: `token ${kind}${special}`, "data-level": level, "data-index": index }, ...visible(text)));
      }
      spans.push(...made);
      box.append(...made);
      if (end < figures.size) {
        const more = el("button", { type: "button" }, `show more of ${number(figures.size)} tokens`);
        more.addEventListener("click", () => {
          more.remove();
          extend(colours);
        });
        box.append(more);
      }
    }

    function choose(index) {
      if (index < 0 || index >= spans.length) return;
      spans[chosen]?.classList.remove("chosen");
      chosen = index;
      spans[index].classList.add("chosen");
      const value = (name) => (name === "version" ? String(figures.version[index]) : number(figures[name][index]));
      const [train, teacher] = ["difference", "teacher"].map((name) => figures.logprob[index] + figures[name][index]);
      const pairs = [
        ["token", `${index + 1} of ${figures.size}`],
        ["text", JSON.stringify(figures.texts[index])],
        ["id", figures.ids[index] < 0 ? "–" : String(figures.ids[index])],
        ...known.map((name) => [FIGURES[name], value(name)]),
        ...(Number.isNaN(train) ? [] : [["train logprob", number(train)]]),
        ...(Number.isNaN(teacher) ? [] : [["teacher logprob", number(teacher)]]),
      ];
      told.replaceChildren(...pairs.map(([name, text]) => el("span", {}, el("span", { class: "soft" }, `${name} `), el("b", {}, ...samples.shown(text)))));
    }

    const pointed = (event) => {
      const token = event.target.closest?.(".token[data-index]");
      if (token) choose(Number(token.dataset.index));
    };
    box.addEventListener("pointerover", pointed);
    box.addEventListener("click", pointed);
    box.addEventListener("focus", () => chosen < 0 && choose(0));
    box.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      choose(chosen + by);
      spans[chosen]?.scrollIntoView({ block: "nearest" });
    });
    pick.value = known.includes(options.colour) ? options.colour : "";
    show(pick.value);
    return [el("div", { class: "controls" }, el("label", { class: "small" }, "show", pick)), under];
  };
})();
