# The course in a container: learners' notebooks in JupyterLab at port 8888, without test tools.
#
#   docker build --build-arg TORCH_INDEX=URL -t minillm .    URL: an index of torch's CPU builds; see the README
#   docker run -p 8888:8888 minillm
#
# Build it from a learners' copy (`minillm course export FOLDER`) to leave the solutions out.
FROM python:3.12-slim
WORKDIR /course
COPY . .
ARG TORCH_INDEX=
RUN python -m pip install --no-cache-dir ${TORCH_INDEX:+--index-url $TORCH_INDEX} "$(grep '^torch==' requirements.lock)"
RUN python -m pip install --no-cache-dir --constraint requirements.lock --editable '.[course]'
# Any user may write the copies of the lessons, also into a volume that is mounted at /course/lab.
RUN minillm doctor && mkdir -p lab && chmod a+rwx lab
EXPOSE 8888
CMD ["sh", "-c", "python -m minillm.course.making.build lab && exec jupyter lab --ip=0.0.0.0 --no-browser --allow-root --notebook-dir=lab"]
