"use strict";
// Follows runs: asks the server for their state, and replaces the page's content when their files have changed.
(() => {
  const NEXT_MS = 2000; // between two questions while a run is running
  const LATER_MS = 15000; // between two questions otherwise
  const byId = (id) => document.getElementById(id);
  const address = (name) => `${name}${location.search}`; // with the key
  const asked = async (name) => {
    const answer = await fetch(address(name), { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer;
  };

  // A name of each folding part, to find it in the next content.
  const folds = () => {
    const counts = new Map();
    return [...document.querySelectorAll("details")].map((details) => {
      const section = details.closest("[aria-label]")?.getAttribute("aria-label") ?? "";
      const words = `${details.id}|${section}|${details.id ? "" : details.querySelector("summary").textContent}`;
      counts.set(words, (counts.get(words) ?? 0) + 1);
      return [`${words}|${counts.get(words)}`, details];
    });
  };
  const replace = (next) => {
    const kept = keepPage();
    const wereOpen = new Map(folds().map(([name, details]) => [name, details.open]));
    const focused = document.activeElement?.id;
    const [left, top] = [scrollX, scrollY];
    document.title = next.title;
    document.body.replaceChildren(...next.body.childNodes);
    keepPage = startPage(kept);
    folds().forEach(([name, details]) => { details.open = wereOpen.get(name) ?? details.open; });
    if (focused) byId(focused)?.focus({ preventScroll: true });
    scrollTo(left, top);
  };
  // Somebody drags, types or chooses: the content stays until the next question.
  let isPressed = false;
  addEventListener("pointerdown", () => { isPressed = true; });
  ["pointerup", "pointercancel", "blur"].forEach((name) => addEventListener(name, () => { isPressed = false; }));
  const isBusy = () => isPressed || byId("choose").open || ["x", "smooth"].includes(document.activeElement?.id)
    || String(getSelection());

  const say = (words, isRunning) => {
    byId("live").textContent = words;
    byId("live").classList.toggle("running", isRunning);
  };
  const follow = async () => {
    let wait = LATER_MS;
    try {
      const { version, runs, isRunning } = await (await asked("state")).json();
      if (version !== byId("live").dataset.version && !isBusy()) {
        replace(new DOMParser().parseFromString(await (await asked("")).text(), "text/html"));
      }
      say(runs.join(" · "), isRunning);
      if (isRunning) wait = NEXT_MS;
    } catch (error) {
      const hasEnded = error instanceof TypeError; // no connection
      say(hasEnded ? "no answer: rlctl report --serve has ended, and this page shows its last state" : error.message, false);
    }
    setTimeout(follow, wait);
  };
  follow();
})();
