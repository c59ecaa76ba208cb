// Elements without HTML: every text becomes a text node, so nothing that a model wrote is markup.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else if (name in element && name !== "list" && !name.includes("-") && name !== "role") element[name === "class" ? "className" : name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return element;
}

// The controls in an element that equal another one, which may be of an earlier content, in text, name and target.
export function copies(element, one) {
  const same = (each) => ["href", "aria-label"].every((name) => each.getAttribute(name) === one.getAttribute(name));
  return [...element.querySelectorAll(one.localName)].filter((each) => each.textContent === one.textContent && same(each));
}

// Replace the content. If it has the keyboard focus, the copy of the focused control in the new content gets it.
export function fill(element, ...children) {
  const focused = document.activeElement;
  const place = focused !== element && element.contains(focused) ? copies(element, focused).indexOf(focused) : -1;
  element.replaceChildren(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  if (place >= 0) copies(element, focused)[place]?.focus({ preventScroll: true });
}

// Set a text only if it differs: screen readers and selections stay undisturbed.
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
