"""Forms a bundle can be written in, for other tools and for people; `hetjax opt --emit` names them."""
