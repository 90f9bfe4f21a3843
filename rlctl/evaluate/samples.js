"use strict";
// What models wrote reaches the page through textContent only.
(() => {
  const PAGE = 20;
  const CLIP = 6000;
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const chips = [...document.querySelectorAll("[data-outcome]")];
  const filter = { outcomes: new Set(), truncated: false, source: "", words: "" };
  let found = [];
  let page = 0;
  let current = -1;

  const element = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const count = (number) => number.toLocaleString("en");
  // Characters that hide or turn text around are shown by their number.
  const visible = (text) =>
    text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, (each) =>
      "⟨U+" + each.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩");
  const has = (text, words) => text !== null && text.toLowerCase().includes(words);

  const matches = (question, response) =>
    (filter.outcomes.size === 0 || filter.outcomes.has(response.outcome)) &&
    (!filter.truncated || response.truncated) &&
    (filter.words === "" || question.hit || has(response.text, filter.words) || has(response.answer, filter.words));

  const search = () => {
    found = [];
    let responses = 0;
    for (const question of data.questions) {
      if (filter.source && question.source !== filter.source) continue;
      question.hit =
        filter.words !== "" && (has(question.prompt, filter.words) || has(question.truth, filter.words));
      const hits = question.responses.filter((response) => matches(question, response));
      if (hits.length) {
        found.push({ question, hits });
        responses += hits.length;
      }
    }
    page = 0;
    byId("count").textContent = `${count(responses)} responses, ${count(found.length)} questions`;
    show();
  };

  const block = (text) => {
    const box = element("div");
    const pre = element("pre", "", visible(text.length > CLIP ? text.slice(0, CLIP) : text));
    pre.dir = "auto";
    pre.tabIndex = 0;
    box.append(pre);
    if (text.length > CLIP) {
      const more = element("button", "more", `show all ${count(text.length)} characters`);
      more.type = "button";
      more.addEventListener("click", () => { pre.textContent = visible(text); more.remove(); });
      box.append(more);
    }
    return box;
  };

  const responseCard = (response) => {
    const card = element("section", `response ${response.outcome}`);
    const head = element("h3");
    const name = { right: "right", wrong: "wrong", error: "grader error" }[response.outcome];
    head.append(element("span", "", `response ${response.sample}`), element("b", "", name));
    if (response.reward !== null) head.append(element("span", "", `reward ${+response.reward.toFixed(4)}`));
    head.append(element("span", "", `${count(response.tokens)} tokens`));
    if (response.truncated) head.append(element("i", "", "truncated"));
    if (response.answer !== null) head.append(element("span", "", `answer ${visible(response.answer.slice(0, 200))}`));
    card.append(head, block(response.text));
    return card;
  };

  const questionCard = ({ question, hits }) => {
    const card = element("article");
    card.tabIndex = -1;
    const title = element("h2");
    title.append(
      element("span", "", `Question ${count(question.index)}`),
      element("small", "", question.source),
      element("small", "", `${question.right} of ${question.of} right`),
    );
    const asked = element("div", "asked");
    for (const [name, text] of [["prompt", question.prompt], ["ground truth", question.truth]]) {
      const part = element("div");
      part.append(element("h3", "", name), block(text));
      asked.append(part);
    }
    const said = element("div", "said");
    said.append(...hits.map(responseCard));
    card.append(title, asked, said);
    const others = question.responses.filter((response) => !hits.includes(response));
    if (others.length) {
      const more = element("button", "more", `show the other ${count(others.length)} responses`);
      more.type = "button";
      more.addEventListener("click", () => { said.append(...others.map(responseCard)); more.remove(); });
      card.append(more);
    }
    return card;
  };

  const show = () => {
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    page = Math.min(Math.max(page, 0), pages - 1);
    current = -1;
    const cards = found.slice(page * PAGE, (page + 1) * PAGE).map(questionCard);
    byId("questions").replaceChildren(
      ...(cards.length ? cards : [element("p", "nothing", "No response fits these filters.")]));
    byId("page").textContent = `page ${count(page + 1)} of ${count(pages)}`;
    byId("previous").disabled = page === 0;
    byId("next").disabled = page === pages - 1;
  };

  const scrollTo = (target) => {
    const nav = document.querySelector("nav");
    const covered = getComputedStyle(nav).position === "sticky" ? nav.offsetHeight + 8 : 0;
    window.scrollTo(0, window.scrollY + target.getBoundingClientRect().top - covered);
  };
  const turn = (by) => {
    page += by;
    show();
    scrollTo(byId("questions"));
  };
  const move = (by) => {
    const cards = document.querySelectorAll("article");
    if (!cards.length) return;
    current = Math.min(Math.max(current + by, 0), cards.length - 1);
    cards[current].focus({ preventScroll: true });
    scrollTo(cards[current]);
  };
  const toggleOutcome = (chip) => {
    const name = chip.dataset.outcome;
    if (!filter.outcomes.delete(name)) filter.outcomes.add(name);
    chip.setAttribute("aria-pressed", String(filter.outcomes.has(name)));
    search();
  };
  const toggleTruncated = () => {
    filter.truncated = !filter.truncated;
    byId("truncated").setAttribute("aria-pressed", String(filter.truncated));
    search();
  };
  const clear = () => {
    Object.assign(filter, { outcomes: new Set(), truncated: false, source: "", words: "" });
    [...chips, byId("truncated")].forEach((button) => button.setAttribute("aria-pressed", "false"));
    byId("source").value = byId("search").value = "";
    byId("search").blur();
    search();
  };

  const responses = data.questions.flatMap((question) => question.responses);
  for (const chip of chips) {
    const number = responses.filter((response) => response.outcome === chip.dataset.outcome).length;
    chip.querySelector("b").textContent = count(number);
    chip.addEventListener("click", () => toggleOutcome(chip));
  }
  byId("truncated").querySelector("b").textContent = count(responses.filter((each) => each.truncated).length);
  byId("truncated").addEventListener("click", toggleTruncated);
  const sources = [...new Set(data.questions.map((question) => question.source))].sort();
  const everything = element("option", "", "all");
  everything.value = "";
  byId("source").append(everything, ...sources.map((source) => element("option", "", source)));
  byId("source").addEventListener("change", (event) => { filter.source = event.target.value; search(); });
  let waiting;
  byId("search").addEventListener("input", (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { filter.words = event.target.value.toLowerCase(); search(); }, 150);
  });
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  const keys = {
    j: () => move(1), k: () => move(-1), n: () => turn(1), p: () => turn(-1), t: toggleTruncated,
    r: () => toggleOutcome(chips[0]), w: () => toggleOutcome(chips[1]), e: () => toggleOutcome(chips[2]),
    "/": () => byId("search").focus(),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") { clear(); return; }
    if (/^(INPUT|SELECT)$/.test(event.target.tagName) || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  search();
})();
