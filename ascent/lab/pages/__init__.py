"""The pages. Each is a folder: `page.py` with its `routes(lab)`, `page.js` and `page.css` with what they import."""
