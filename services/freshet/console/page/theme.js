// Light, dark or as the system says. Runs before the first paint, so that a remembered choice does not flash.
"use strict";
(() => {
  const KEY = "freshet.theme";
  const CHOICES = ["system", "light", "dark"];
  const root = document.documentElement;

  const remembered = () => {
    try {
      const kept = localStorage.getItem(KEY);
      return CHOICES.includes(kept) ? kept : "system";
    } catch {
      return "system"; // storage may be forbidden
    }
  };
  const show = (choice) => {
    root.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${choice}`;
    document.dispatchEvent(new Event("freshet:theme"));
  };

  show(remembered());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(root.dataset.theme));
  document.addEventListener("DOMContentLoaded", () => {
    show(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = CHOICES[(CHOICES.indexOf(root.dataset.theme) + 1) % CHOICES.length];
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // then it lasts until the page is closed
      }
      show(next);
    });
  });
})();
