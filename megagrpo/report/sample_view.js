// One sample: its facts, its score and why, what was said, its tokens in colours, and other responses beside it.
"use strict";

const sampleView = (() => {
  const { el, number } = report;
  const { shown, NONE, SOLVED, AGENT } = samples;
  const CHARACTERS = 50_000; // of a text that are shown at first
  const DIFF_CHARACTERS = 200_000;
  const DIFF_MILLISECONDS = 2_000;
  const STEPS = 60; // of a prompt's other steps that are shown at first

  // --- texts -----------------------------------------------------------------------------------------------------------

  /** A text of any length, in whatever direction it is written. */
  function text(value, attributes = {}) {
    const whole = typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "";
    const pre = el("pre", { dir: "auto", ...attributes });
    if (!whole) pre.append(el("span", { class: "soft" }, "(empty)"));
    const more = el("button", { type: "button", onclick: () => pre.replaceChildren(...shown(whole)) });
    more.textContent = `show all ${number(whole.length)} characters`;
    pre.append(...shown(whole.slice(0, CHARACTERS)), ...(whole.length > CHARACTERS ? ["… ", more] : []));
    return pre;
  }

  /** One line of text, cut to `most` characters. */
  function brief(value, most = 200) {
    const whole = typeof value === "string" ? value : JSON.stringify(value) ?? "";
    return shown(whole.length > most ? `${whole.slice(0, most)}…` : whole);
  }

  // --- conversations ---------------------------------------------------------------------------------------------------

  /** What somebody said: a message's thoughts, its text and its calls of tools. */
  function said(message) {
    if (!message || typeof message !== "object") return [text(message ?? "")];
    const nodes = [];
    if (message.reasoning_content) {
      nodes.push(el("details", {}, el("summary", { class: "soft small" }, "thinks"), text(message.reasoning_content)));
    }
    const calls = Array.isArray(message.tool_calls) ? message.tool_calls : [];
    if (message.content || !calls.length) nodes.push(text(message.content ?? ""));
    for (const call of calls) {
      const named = call?.function ?? call ?? {};
      nodes.push(el("div", { class: "call" }, el("b", {}, "calls ", ...brief(named.name ?? "a tool")), text(argumentsOf(named.arguments))));
    }
    return nodes;
  }

  /** A call's arguments, which models write as JSON in a string. */
  function argumentsOf(given) {
    if (typeof given !== "string") return given ?? {};
    try {
      return JSON.parse(given);
    } catch {
      return given;
    }
  }

  function turn(role, title, ...children) {
    const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
    return el("div", { class: `turn ${known}` }, el("div", { class: "turn-head" }, ...title), ...children);
  }

  function message(value) {
    if (!value || typeof value !== "object") return turn("other", ["text"], text(value));
    return turn(value.role, [...brief(value.role ?? "message"), ...(value.name ? [" ", ...brief(value.name)] : [])], ...said(value));
  }

  function asked(sample) {
    const raw = el("details", {}, el("summary", { class: "soft small" }, "as the chat template wrote it"));
    raw.addEventListener("toggle", () => raw.open && raw.childElementCount === 1 && raw.append(text(sample.prompt)));
    if (!Array.isArray(sample.messages)) return [text(sample.prompt)];
    return [...sample.messages.map(message), ...(sample.prompt ? [raw] : [])];
  }

  // --- what agents did -------------------------------------------------------------------------------------------------

  function agentRun(agent, branches) {
    if (typeof agent !== "object") return [text(agent)];
    const counts = Object.entries(agent.counts ?? {}).filter(([, value]) => value);
    const facts = el("dl", {});
    const fact = (name, ...value) => facts.append(el("dt", {}, name), el("dd", {}, ...value));
    if (agent.error) fact("the agent failed", el("span", { class: "bad" }, ...brief(agent.error, 2000)));
    if (agent.reward) fact("from the agent", ...brief(pairs(Object.entries(agent.reward))));
    if (agent.sequences?.length) fact("sequences", agent.sequences.map((of) => `${of.tokens} tokens, ${of.trained} trained`).join("; "));
    if (counts.length) fact("counts", ...brief(pairs(counts)));
    return [facts, ...(agent.events ?? []).flatMap((event) => happened(event, branches))];
  }

  function pairs(entries) {
    return entries.map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : value}`).join(", ");
  }

  function happened(event, branches) {
    const seconds = (value) => (typeof value === "number" ? `${number(value)} s` : "");
    if (event.kind === "turn") {
      const given = Array.isArray(event.given) ? event.given.map(message) : [text(event.given ?? "")];
      const parts = [`policy, turn ${event.number}`, `at ${seconds(event.at)}`, `took ${seconds(event.seconds)}`];
      parts.push(`${event.prompt_tokens} tokens read, ${event.given_tokens} of them new`, `${event.tokens} sampled`);
      if (event.finish === "length") parts.push("cut off");
      if (event.unreadable) parts.push("a tool call can't be read");
      if (typeof event.reward === "number") parts.push(`reward ${number(event.reward)}`);
      if (event.sequence === undefined) parts.push("not trained on");
      const begins = event.branch ? [el("p", { class: "soft small" }, `Another sequence begins: ${branches[event.branch] ?? event.branch}`)] : [];
      return [...begins, ...given, turn("assistant", [parts.join(" · ")], ...said(event.said))];
    }
    if (event.kind === "tool") {
      const title = [el("b", {}, ...brief(event.name ?? "tool")), ` ran ${seconds(event.seconds)}, told at ${seconds(event.at)}`];
      const failed = event.error ? [el("p", { class: "bad" }, "failed: ", ...brief(event.error, 2000))] : [];
      const part = (name) => (event[name] === undefined ? [] : [el("div", { class: "soft small" }, name), text(event[name])]);
      return [turn("tool", title, ...failed, ...part("arguments"), ...part("result"))];
    }
    if (event.kind === "left_out") return [el("p", { class: "soft" }, `… ${event.events} events are left out …`)];
    const { kind, at, ...rest } = event;
    return [turn("other", [...brief(kind), ` at ${seconds(at)}`], text(rest))];
  }

  // --- score -----------------------------------------------------------------------------------------------------------

  function score(store, sample) {
    const { row } = sample;
    const facts = el("dl", {});
    const fact = (name, ...value) => facts.append(el("dt", {}, ...brief(name)), el("dd", {}, ...value));
    if (sample.error) fact("a reward failed", el("span", { class: "bad" }, ...brief(sample.error, 5000)));
    if (sample.masked) fact("left out", ...brief(sample.masked, 5000));
    const notes = new Map(sample.notes);
    for (const [name, value] of sample.parts) fact(name, el("b", {}, typeof value === "number" ? number(value) : String(value)));
    if (sample.answer !== null) {
      const equal = sample.answer.trim() === sample.truth.trim();
      fact("answer as read", el("span", { class: "answer", dir: "auto" }, ...brief(sample.answer, 5000)));
      if (sample.truth) fact("", el("span", { class: "soft small" }, equal ? "the same text as the ground truth" : "another text than the ground truth"));
    }
    if (sample.truth) fact("ground truth", el("span", { class: "answer", dir: "auto" }, ...brief(sample.truth, 5000)));
    for (const [name, note] of notes) fact(name, el("span", { class: "answer", dir: "auto" }, ...brief(note, 5000)));
    const why = Number.isNaN(store.score[row]) ? "no score" : `score ${number(store.score[row])}`;
    const solved = store.is(row, SOLVED) ? " · solved" : "";
    return [el("h3", {}, `${why}${solved}`), facts.childElementCount ? facts : el("p", { class: "soft" }, "The run says no more of it.")];
  }

  // --- beside another --------------------------------------------------------------------------------------------------

  function label(store, row) {
    const run = store.runs.length > 1 ? `${store.runs[store.run[row]]}, ` : "";
    const step = store.step[row] < 0 ? "" : `step ${store.step[row]}, `;
    return `${run}${step}response ${store.sample[row]}`;
  }

  /** Responses to the same prompt, by run and step: buttons with their scores. */
  function others(store, row, options) {
    const groups = new Map();
    for (const other of store.ofPrompt(row)) {
      const key = `${store.run[other]} ${store.step[other]}`;
      groups.set(key, [...(groups.get(key) ?? []), other]);
    }
    const lines = [...groups.values()].map((rows) => {
      const [first] = rows;
      const title = `${store.runs.length > 1 ? `${store.runs[store.run[first]]} · ` : ""}${store.step[first] < 0 ? "–" : `step ${store.step[first]}`}`;
      const buttons = rows.map((other) => {
        const value = Number.isNaN(store.score[other]) ? "–" : number(store.score[other]);
        const mark = store.is(other, SOLVED) ? " ✓" : "";
        if (other === row) return el("b", { class: "here", title: "this one" }, `${value}${mark}`);
        const pressed = other === options.compared;
        const press = () => options.compare(pressed ? NONE : other);
        return el("button", { type: "button", "aria-pressed": String(pressed), title: label(store, other), onclick: press }, `${value}${mark}`);
      });
      return el("div", { class: "others" }, el("span", { class: "soft small" }, ...shown(title)), el("span", {}, ...buttons));
    });
    const box = el("div", { class: "others-box" }, ...lines.slice(0, STEPS));
    if (lines.length > STEPS) {
      box.append(el("button", { type: "button", onclick: () => box.replaceChildren(...lines) }, `all ${lines.length} steps`));
    }
    const alone = lines.length === 1 && groups.values().next().value.length === 1;
    return alone ? [el("p", { class: "soft" }, "This page has no other response to this prompt.")] : [box];
  }

  async function beside(store, sample, options) {
    const other = await store.full(options.compared);
    const newer = (one, two) => store.run[one] - store.run[two] || store.step[one] - store.step[two] || one - two;
    const [left, right] = newer(sample.row, other.row) > 0 ? [other, sample] : [sample, other];
    const long = Math.max(left.response.length, right.response.length) > DIFF_CHARACTERS;
    const parts = long ? undefined : Diff.diffWordsWithSpace(left.response, right.response, { timeout: DIFF_MILLISECONDS });
    const side = (of, gone) => {
      const pre = el("pre", { dir: "auto" });
      for (const part of parts ?? []) {
        if (gone ? part.removed : part.added) pre.append(el(gone ? "del" : "ins", {}, ...shown(part.value)));
        else if (!part.removed && !part.added) pre.append(...shown(part.value));
      }
      const go = el("button", { type: "button", class: "plain", onclick: () => options.go(of.row) }, ...shown(label(store, of.row)));
      const value = Number.isNaN(store.score[of.row]) ? "no score" : `score ${number(store.score[of.row])}`;
      const title = el("h4", {}, of === sample ? `this one: ${label(store, of.row)}` : go, el("span", { class: "soft small" }, ` · ${value} · ${number(store.tokens[of.row])} tokens`));
      return el("div", { class: "side" }, title, parts ? pre : text(of.response));
    };
    const note = parts ? "" : "Too long, or too different, for a comparison word by word.";
    return [note && el("p", { class: "soft small" }, note), el("div", { class: "sides" }, side(left, true), side(right, false))];
  }

  // --- all of it -------------------------------------------------------------------------------------------------------

  /** Nodes that show a row; options: what samples.js can do with it. */
  return async function sampleView(store, row, options) {
    const sample = await store.full(row);
    const figures = await store.tokensOf(row);
    const { place, listed } = options;
    const button = (title, text, onclick, disabled) => el("button", { type: "button", "aria-label": title, title, onclick, disabled }, text);
    const bar = el(
      "div",
      { class: "controls sample-bar" },
      button("back to the list", "← list", options.close),
      button("previous (k)", "‹", () => options.step(-1), place <= 0),
      button("next (j)", "›", () => options.step(1), place === NONE || place + 1 >= listed),
      el("span", { class: "soft small" }, place === NONE ? "not in this list" : `${number(place + 1)} of ${number(listed)}`),
      button("print this sample", "print", print),
    );
    const versions = figures ? [...new Set(figures.version)].sort((a, b) => a - b) : [];
    const facts = [
      ["advantage", number(store.advantage[row])],
      ["tokens", `${number(store.tokens[row])} after a prompt of ${number(store.prompt_tokens[row])}`],
      ["ended with", store.name("finish", row)],
      ["age", store.age[row] === 1 ? "1 version" : `${store.age[row]} versions`],
      ["versions", versions.length > 3 ? `${versions[0]} … ${versions.at(-1)}` : versions.join(", ")],
      ["source", store.name("data_source", row)],
      ["ability", sample.ability],
      ["teacher", sample.teacher],
      ["mean mismatch", Number.isNaN(store.mismatch[row]) ? "" : `${number(store.mismatch[row])} nats`],
    ];
    const title = `${label(store, row)} · ${store.name("set", row)}`;
    const known = facts.filter(([, value]) => value && value !== "–");
    const response = el("div", {});
    const agent = sample.agent && store.is(row, AGENT);
    if (figures) {
      response.append(...tokenView(figures, text(sample.response), options));
    } else {
      const why = store.figures.some(Boolean) ? "This page has no figures of its tokens: see “what is not in this page”." : "";
      response.append(text(sample.response), el("p", { class: "soft small" }, why));
    }
    return [
      bar,
      el("h3", { class: "sample-title" }, ...shown(title)),
      el("p", { class: "soft small" }, "prompt ", ...shown(store.promptId(row))),
      el("p", { class: "facts" }, ...known.map(([name, value]) => el("span", {}, `${name} `, el("b", {}, ...shown(value))))),
      ...score(store, sample),
      el("h3", {}, "Prompt"),
      ...asked(sample),
      ...(agent ? [el("h3", {}, "What the agent did"), ...agentRun(sample.agent, store.branches)] : []),
      el("h3", {}, agent ? "Last answer, and the tokens of all turns" : "Response"),
      response,
      el("h3", {}, "The same prompt"),
      el("p", { class: "soft small" }, "Scores of all responses to it; press one to see it beside this one."),
      ...others(store, row, options),
      ...(options.compared === NONE ? [] : await beside(store, sample, options)),
    ].filter(Boolean);
  };

  /** Prints the sample alone. */
  function print() {
    document.documentElement.classList.add("print-sample");
    addEventListener("afterprint", () => document.documentElement.classList.remove("print-sample"), { once: true });
    window.print();
  }
})();
