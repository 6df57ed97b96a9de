"""What makes the documentation: the generated reference pages, and what MkDocs needs to know of this repository."""
