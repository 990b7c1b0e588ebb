"""Other libraries' models on the ops. Nothing is imported here: each module needs the library it is named after."""
