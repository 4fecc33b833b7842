"""Labels of texts, words, images, sounds and series: one objective, one classifier, one judge."""
