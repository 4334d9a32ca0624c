// Settles the theme before the first paint, so that it does not flash: the one chosen here, or else the system's. The
// style sheet goes by `data-theme`; `themechange` is told to what must be drawn anew.
"use strict";
(() => {
  const KEPT = "headstart.theme";
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;

  function chosen() {
    const kept = localStorage.getItem(KEPT);
    return kept === "light" || kept === "dark" ? kept : "auto";
  }

  function settle() {
    const theme = chosen() === "auto" ? (system.matches ? "dark" : "light") : chosen();
    if (root.dataset.theme === theme) return;
    root.dataset.theme = theme;
    dispatchEvent(new Event("themechange"));
  }

  function choose(theme) {
    if (theme === "auto") localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, theme);
    settle();
  }

  window.headstartTheme = { chosen, choose };
  system.addEventListener("change", settle);
  addEventListener("storage", settle); // chosen in another tab
  settle();
})();
