// What scrolls can be scrolled by the keyboard.
document$.subscribe(() => document.querySelectorAll(".md-typeset__scrollwrap, div.formula").forEach((e) => { e.tabIndex = 0; }));
