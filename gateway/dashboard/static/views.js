// The views of the page and the hash that names the one shown, so that a view can be linked to and Back works.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

export const VIEWS = {
  overview: "Overview",
  misses: "Misses",
  templates: "Templates",
  documents: "Documents",
  replicas: "Replicas",
  eviction: "Eviction",
  quality: "Quality",
  requests: "Requests",
};

const named = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : "overview");

export function useView() {
  const [view, setView] = useState(named);
  useEffect(() => {
    const follow = () => {
      setView(named());
      scrollTo(0, 0);
    };
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = view === "overview" ? "Headstart" : `${VIEWS[view]} · Headstart`;
  }, [view]);
  return view;
}

export function Navigation({ view }) {
  const list = useRef(null);
  useEffect(() => {
    // On a phone the links scroll: the one of this view is brought into sight, and nothing else moves.
    const { offsetLeft, offsetWidth } = list.current.querySelector("[aria-current]");
    const bar = list.current.parentElement;
    bar.scrollLeft = offsetLeft + offsetWidth / 2 - bar.clientWidth / 2;
  }, [view]);
  return html`<nav aria-label="Views">
    <ul ref=${list}>
      ${Object.entries(VIEWS).map(
        ([name, label]) => html`<li key=${name}><a href=${`#${name}`} aria-current=${name === view ? "page" : null}>${label}</a></li>`,
      )}
    </ul>
  </nav>`;
}
