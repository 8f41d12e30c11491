// The page's own functions, as `report`: its data, its parts, elements, numbers, colours, what is new while a run goes on.
"use strict";

const report = (() => {
  const POLL_SECONDS = 5;
  const PALETTE = document.documentElement.dataset.palette.split(" ");
  const loaded = new Map(); // name: promise of columns
  const listeners = new Map(); // name: functions of columns
  const themes = new Set();
  const renewed = new WeakMap(); // body of a part: its newest content

  // --- data ----------------------------------------------------------------------------------------------------------

  function holder(name) {
    return document.querySelector(`script[data-name="${CSS.escape(name)}"]`);
  }

  /** Columns by name (report/parts.py): typed arrays, strings, lists. Each is read once, or each time if not `keep`. */
  function load(name, keep = true) {
    if (!keep) return read(name);
    if (!loaded.has(name)) loaded.set(name, read(name));
    return loaded.get(name);
  }

  async function read(name) {
    if (!holder(name) && document.readyState === "loading") {
      await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true })); // late ones
    }
    const held = holder(name);
    if (held) return decode(bytesOf(held.textContent));
    if (!("live" in document.documentElement.dataset)) throw new Error(`the page has no ${name}`);
    const answer = await fetch(`data/${encodeURIComponent(name)}${location.search}`);
    if (!answer.ok) throw new Error("the run has gone on; open it once more");
    return decode(new Uint8Array(await answer.arrayBuffer()));
  }

  /** Calls `then(columns)` whenever a running run has written more. */
  function changed(name, then) {
    listeners.set(name, [...(listeners.get(name) ?? []), then]);
  }

  function bytesOf(base64) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
    const text = atob(base64);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    return bytes;
  }

  async function decode(bytes) {
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const buffer = await new Response(stream).arrayBuffer();
    const length = new DataView(buffer).getUint32(0, true);
    const told = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    return withArrays(told, buffer, 4 + length);
  }

  function withArrays(value, buffer, base) {
    if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
    if (value.$array) {
      const [type, offset, items] = value.$array;
      return new globalThis[type](buffer, base + offset, items);
    }
    for (const key of Object.keys(value)) value[key] = withArrays(value[key], buffer, base);
    return value;
  }

  // --- parts ---------------------------------------------------------------------------------------------------------

  /** Starts a part's script with the body of its section. What it throws is shown there. */
  function part(anchor, start) {
    const body = document.querySelector(`#${CSS.escape(anchor)} > .body`);
    if (!body) return;
    Promise.resolve()
      .then(() => start(body))
      .catch((error) => {
        console.error(error);
        body.append(el("p", { class: "bad", role: "alert" }, `This part of the page failed: ${error.message}`));
      });
  }

  /** Calls `start()` once, when the element is about to be seen. */
  function whenSeen(element, start) {
    const observer = new IntersectionObserver(
      (entries) => {
        if (!entries.some((entry) => entry.isIntersecting)) return;
        observer.disconnect();
        start();
      },
      { rootMargin: "300px" },
    );
    observer.observe(element);
  }

  /** An element; attributes that begin with "on" are listeners; children are elements or text, never HTML. */
  function el(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  /** A number in at most five figures. */
  function number(value) {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
    if (Number.isInteger(value)) return value.toLocaleString("en");
    return value.toLocaleString("en", { maximumSignificantDigits: size < 10000 ? 4 : 5 });
  }

  // --- colours -------------------------------------------------------------------------------------------------------

  function palette(index) {
    return PALETTE[index % PALETTE.length];
  }

  /** The present value of one of page.css's colours, such as "--soft". */
  function colour(name) {
    const probe = document.getElementById("theme");
    const before = probe.style.outlineColor;
    probe.style.outlineColor = `var(${name})`;
    const found = getComputedStyle(probe).outlineColor;
    probe.style.outlineColor = before;
    return found;
  }

  /** Calls `then()` when the page has become light or dark. */
  function themed(then) {
    themes.add(then);
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function setTheme(theme) {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    document.getElementById("theme").setAttribute("aria-label", isDark() ? "make it light" : "make it dark");
    document.getElementById("theme").textContent = isDark() ? "☀" : "☾";
    for (const then of themes) then();
  }

  function stored(value) {
    try {
      if (value !== undefined) localStorage.setItem("megagrpo-theme", value);
      return localStorage.getItem("megagrpo-theme");
    } catch {
      return null; // a browser that keeps nothing of pages that are files
    }
  }

  setTheme(stored());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    setTheme(document.documentElement.dataset.theme);
  });
  document
    .getElementById("theme")
    .addEventListener("click", () => setTheme(stored(isDark() ? "light" : "dark") ?? (isDark() ? "light" : "dark")));
  let before;
  addEventListener("beforeprint", () => {
    before = document.documentElement.dataset.theme;
    setTheme("light");
  });
  addEventListener("afterprint", () => setTheme(before));

  // --- a run that goes on --------------------------------------------------------------------------------------------

  async function poll() {
    const query = location.search;
    const answer = await fetch(`changes${query}`);
    if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
    const { data, html } = await answer.json();
    for (const [name, digest] of Object.entries(data)) {
      const held = holder(name);
      if (!held || held.dataset.digest === digest) continue;
      const columns = await decode(
        new Uint8Array(await (await fetch(`data/${encodeURIComponent(name)}${query}`)).arrayBuffer()),
      );
      held.dataset.digest = digest;
      held.textContent = ""; // what it held is old
      loaded.set(name, Promise.resolve(columns));
      for (const then of listeners.get(name) ?? []) then(columns);
    }
    for (const [anchor, text] of Object.entries(html))
      renew(document.querySelector(`#${CSS.escape(anchor)} > .body`), text);
  }

  /** Gives a part without a script its new content; what was unfolded stays so. */
  function renew(body, text) {
    if (!body || renewed.get(body) === text) return;
    renewed.set(body, text);
    const open = [...body.querySelectorAll("details")].map((details) => details.open);
    body.innerHTML = text;
    body.querySelectorAll("details").forEach((details, index) => (details.open = open[index] ?? details.open));
  }

  async function watch() {
    const status = el("span", { id: "live", role: "status" }, "live");
    document.querySelector("header").append(status);
    for (;;) {
      await new Promise((done) => setTimeout(done, POLL_SECONDS * 1000));
      try {
        await poll();
        status.textContent = `live, as of ${new Date().toLocaleTimeString()}`;
      } catch (error) {
        status.textContent = `no longer live: ${error.message}`;
      }
    }
  }

  if ("live" in document.documentElement.dataset) watch();

  return { load, changed, part, whenSeen, el, number, palette, colour, themed, isDark };
})();
