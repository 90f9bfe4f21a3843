// What is wrong with the layout of a page, in words; for tests.
() => {
  const wrong = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) wrong.push(`the page is ${root.scrollWidth} wide, in ${root.clientWidth}`);
  const words = (element) => `${element.tagName} ${element.className} ${element.textContent.trim().slice(0, 40)}`;
  const scrolls = (element) => {
    for (let at = element.parentElement; at; at = at.parentElement) {
      if (["auto", "scroll"].includes(getComputedStyle(at).overflowX)) return true;
    }
    return false;
  };
  const channels = (text) => {
    const numbers = text.match(/[\d.]+(e-?\d+)?/g).map(Number);
    const [red, green, blue] = text.startsWith("color(") ? numbers.slice(0, 3).map((one) => 255 * one) : numbers;
    return [red, green, blue, numbers[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map((at) => top[3] * top[at] + (1 - top[3]) * below[at]);
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(channels(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const luminance = (colour) => {
    const [red, green, blue] = colour.map((one) => one / 255).map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  document.querySelectorAll("body *").forEach((element) => {
    const style = getComputedStyle(element);
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || style.visibility === "hidden" || element.closest("script, svg")) return;
    if (!scrolls(element) && (box.right > root.clientWidth + 1 || box.left < -1)) wrong.push(`outside: ${words(element)}`);
    const hides = ["hidden", "clip"].includes(style.overflowX) && style.textOverflow !== "ellipsis";
    if (hides && element.scrollWidth > element.clientWidth + 1) wrong.push(`cut: ${words(element)}`);
    const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!hasText || element.closest(":disabled, option")) return;
    const below = ground(element);
    const shown = contrast(over(channels(style.color), below), below);
    const size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5; // WCAG 2.2, AA
    if (shown < needed) wrong.push(`contrast ${shown.toFixed(2)}: ${words(element)}`);
  });
  document.querySelectorAll("svg text").forEach((text) => {
    const [box, frame] = [text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()];
    if (box.width && (box.left < frame.left - 1 || box.right > frame.right + 1)) wrong.push(`cut: ${words(text)}`);
    const fill = channels(getComputedStyle(text).fill);
    const below = ground(text.closest("figure"));
    const shown = contrast(over(fill, below), below);
    if (box.width && shown < 4.5) wrong.push(`contrast ${shown.toFixed(2)}: ${words(text)}`);
  });
  return [...new Set(wrong)];
}
