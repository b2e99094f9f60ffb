"""`minillm report`: one page about a model on this machine, for people who did not take the course.  Lesson 99.

What decides which measurements a report has, and what explains them, belongs here. How to measure does not: that is in
`bench` and `evaluate`.

settings.py   what is measured, and how much of it
measure.py    the measurements, part by part: a part that fails does not stop the others
findings.py   what the figures say, in sentences that are written only where they are true
sections.py   the page's sections: tables, sentences, pictures
pictures.py   the pictures, as SVG
page.py       the page as one HTML file that loads nothing
run.py        all of it, and the files
"""
